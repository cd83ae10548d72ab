"""`headstart export`: a head, or a model with its head, in the layout of another engine.

run         options -> Report
targets/    one file per layout: `EXPORT` decides and checks everything before the first byte
source      what every layout starts from; plan: what is to be written, then written aside and renamed
drafts      where each model type keeps its MTP module, and what xLLM calls the draft; detect: which of them it is
module      the MTP module of a checkpoint on its own; plain: quantized tensors turned back
gguf_model  the module in llama.cpp's names
heads       which tensors and keys are a head
"""
