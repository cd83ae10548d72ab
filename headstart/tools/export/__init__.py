"""`headstart export`: a head, or a model with its head, in the layout of another engine.

run         options -> Report
targets/    one file per layout: `EXPORT` makes a Plan and checks everything before the first byte is written
source      input of every layout: a checkpoint directory, or trunk and head as arrays
plan        the files to write; they are written to a temporary folder, which is then renamed
module      a checkpoint's MTP module: finding, extracting and dequantizing it
blocks      block drafters in the published layouts
gguf_model  the MTP module with llama.cpp's names and metadata
heads       recognizes the tensors and config keys of a head
"""
