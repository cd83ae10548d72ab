// The Python extension module _native.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, m) {
    nanobind::set_leak_warnings(false); // models may live until the interpreter exits
    headstart::bind_pool(m);
    headstart::bind_packing(m);
    headstart::bind_placing(m);
    headstart::bind_sampling(m);
    headstart::bind_program(m);
    headstart::bind_draft_loop(m);
    headstart::bind_bandwidth(m);
}
