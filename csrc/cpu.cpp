#include "cpu.h"

#include <stdexcept>

namespace headstart {
namespace {

std::vector<Path> usable_paths() {
    std::vector<Path> found;
#ifdef HEADSTART_X86
    __builtin_cpu_init();
    // what CMakeLists.txt compiles the paths for
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
    if (has_avx512) found.push_back({"avx512", &avx512::kernels(), &avx512::kLoops});
    if (has_avx2) found.push_back({"avx2", &avx2::kernels(), &avx2::kLoops});
#endif
    found.push_back({"portable", &portable::kernels(), &portable::kLoops});
    return found;
}

} // namespace

const std::vector<Path>& paths() {
    static const std::vector<Path> found = usable_paths();
    return found;
}

const Path& find_path(const std::string& name) {
    for (const Path& path : paths())
        if (path.name == name) return path;
    throw std::invalid_argument("this CPU cannot run the instruction-set path " + name);
}

} // namespace headstart
