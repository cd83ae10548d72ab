#include "cpu.h"
#include "system.h"

#include <stdexcept>

#ifdef HEADSTART_AMX
#include <cpuid.h>
#endif
#ifdef HEADSTART_ARM
#include <sys/auxv.h>
#endif

namespace headstart {
namespace {

#ifdef HEADSTART_AMX
// Whether the CPU has bfloat16 tiles and the operating system permits their use.
bool has_amx() { // every CPU with AMX also has AVX512-BF16
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    return (d & kBf16) && (d & kTile) && request_amx();
}
#endif

std::vector<Path> usable_paths() {
    std::vector<Path> found;
#ifdef HEADSTART_X86
    __builtin_cpu_init();
    // the flags that CMakeLists.txt compiles the paths with
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
#ifdef HEADSTART_AVX512BF16 // Cooper Lake has avx512bf16 without avx512vbmi
    const bool has_bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
#endif
#ifdef HEADSTART_AMX
    if (has_avx512 && has_amx()) found.push_back({"amx", &amx::kernels(), &avx512::kLoops});
#endif
#ifdef HEADSTART_AVX512BF16
    if (has_avx512 && has_bf16)
        found.push_back({"avx512bf16", &avx512bf16::kernels(), &avx512::kLoops});
#endif
    if (has_avx512) found.push_back({"avx512", &avx512::kernels(), &avx512::kLoops});
#ifdef HEADSTART_AVXVNNI
    if (has_avx2 && __builtin_cpu_supports("avxvnni"))
        found.push_back({"avxvnni", &avxvnni::kernels(), &avx2::kLoops});
#endif
    if (has_avx2) found.push_back({"avx2", &avx2::kernels(), &avx2::kLoops});
#endif
#ifdef HEADSTART_ARM
    // from the Linux kernel, because user programs may not read the CPU's feature registers
    constexpr unsigned long kDotprod = 1ul << 20, kI8mm = 1ul << 13; // HWCAP_ASIMDDP, HWCAP2_I8MM
    const bool has_dotprod = getauxval(AT_HWCAP) & kDotprod;
    if (has_dotprod && getauxval(AT_HWCAP2) & kI8mm) found.push_back({"i8mm", &i8mm::kernels(), &i8mm::kLoops});
    if (has_dotprod) found.push_back({"dotprod", &dotprod::kernels(), &dotprod::kLoops});
    found.push_back({"neon", &neon::kernels(), &neon::kLoops}); // every ARMv8 processor has it
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
