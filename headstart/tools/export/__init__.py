"""`headstart export`: a head, or a model with its head, in the layout of another engine.

run         options -> Report
targets/    one file per layout: `EXPORT` decides and checks everything before the first byte
source      what every layout starts from; plan: what is to be written, then written aside and renamed
layouts     where each model type keeps its MTP module; detect: which one a config.json asks for
heads       which tensors and keys are a head
dequantize  quantized tensors turned back
"""
