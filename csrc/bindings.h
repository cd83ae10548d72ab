// The parts of the extension module, one function per file.
#pragma once

#include <nanobind/nanobind.h>

namespace headstart {

void bind_pool(nanobind::module_& m);      // pool.cpp: ThreadPool
void bind_packing(nanobind::module_& m);   // packing.cpp: file tensors -> Matrix blocks
void bind_placing(nanobind::module_& m);   // placing.cpp: NUMA placement of weights
void bind_sampling(nanobind::module_& m);  // sampling_binding.cpp: logits -> tokens
void bind_program(nanobind::module_& m);   // program.cpp: recorded forward passes
void bind_draft_loop(nanobind::module_& m);     // draft_loop.cpp
void bind_bandwidth(nanobind::module_& m); // bandwidth.cpp: memory bandwidth and barrier cost

} // namespace headstart
