"""The whole answer is a list of Python calls, as Llama 3.2 and Llama 4 write them: `[f(a="b"), g()]`."""

from __future__ import annotations

from headstart.text.parsers._python_steps import PythonSteps
from headstart.text.parsers.stream import NotThis, Steps


class PythonicParser(PythonSteps):
    """An answer that begins with anything else is content, and so is what follows the list. Only the request's tools
    are called: a list may be text."""

    marks = ("[func_name1(params_name1=",)
    _must_know = True

    def _grammar(self) -> Steps[None]:
        self._begin_call()
        try:
            yield from self._space()
            yield from self._accept("<|python_start|>", "<|python_tag|>")
            yield from self._space()
            yield from self._expect("[")
            yield from self._space()
            whole = yield from self._call_list()
        except NotThis as reason:
            self._stop_call(reason)
            return
        if whole:
            yield from self._ending("]")
            self._forget()
            yield from self._ending("<|python_end|>")


PARSER = PythonicParser
