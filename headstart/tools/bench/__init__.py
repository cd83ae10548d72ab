"""`headstart bench`: measure an engine in this process or a server over HTTP, and say what drafting is worth.

document    the JSON document: Cell, Row, Check, Document
workloads   what is asked: Task, Workload, those that come with headstart and those of a file
measure     `measure(runner, workload, mode, concurrency) -> Cell`, and what a System is
inprocess   the System over engines of this process
http        the System over an OpenAI-compatible server
statistics  `speedup(off_cells, on_cells) -> Interval`, the never-slower check
run         the whole bench: options -> Report; compare: two documents
report      the document as one HTML file
step        `headstart bench step`: passes by rows, drafts; profile: their parts
"""
