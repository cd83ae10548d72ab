// The instruction-set paths of this build that the CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "sampling_loops.h"

namespace headstart {

struct Path {
    std::string name;
    const Kernels* kernels;
    const Loops* loops;
};

const std::vector<Path>& paths();             // fastest first
const Path& find_path(const std::string& name); // throws std::invalid_argument

} // namespace headstart
