// The Python side of the extension: each file binds its own part.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, m) {
    nanobind::set_leak_warnings(false); // models that live until the interpreter ends are no leak
    headstart::bind_pool(m);
    headstart::bind_packing(m);
    headstart::bind_placing(m);
    headstart::bind_sampling(m);
    headstart::bind_program(m);
    headstart::bind_chain(m);
    headstart::bind_bandwidth(m);
}
