#pragma once

#include <nanobind/nanobind.h>

namespace headstart {

void bind_pool(nanobind::module_& m);      // pool.cpp: ThreadPool
void bind_packing(nanobind::module_& m);   // packing.cpp: file tensors -> Matrix blocks
void bind_placing(nanobind::module_& m);   // placing.cpp: which node of memory weights lie on
void bind_sampling(nanobind::module_& m);  // sampling.cpp: logits -> tokens
void bind_program(nanobind::module_& m);   // program.cpp: recorded forwards
void bind_chain(nanobind::module_& m);     // chain.cpp: whole drafts
void bind_bandwidth(nanobind::module_& m); // bandwidth.cpp: how fast memory is read

} // namespace headstart
