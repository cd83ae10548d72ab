// Linux is supported and tested; the other branches follow the systems' documentation and are untested.
#include "system.h"

#include <algorithm>
#include <new>

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#endif
#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headstart {

#ifdef _WIN32
uint8_t* map_pages(int64_t bytes) {
    void* found = VirtualAlloc(nullptr, (SIZE_T)bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!found) throw std::bad_alloc();
    return static_cast<uint8_t*>(found);
}

void unmap_pages(uint8_t* data, int64_t) { VirtualFree(data, 0, MEM_RELEASE); }

void read_ahead(const uint8_t*, int64_t) {}
#else
uint8_t* map_pages(int64_t bytes) {
    void* found = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    return static_cast<uint8_t*>(found);
}

void unmap_pages(uint8_t* data, int64_t bytes) { munmap(data, (size_t)bytes); }

void read_ahead(const uint8_t* data, int64_t bytes) {
    constexpr uintptr_t kPage = 4096;
    constexpr size_t kStep = 1024 * kPage;
#ifdef __APPLE__
    char present[kStep / kPage];
#else
    unsigned char present[kStep / kPage];
#endif
    const uintptr_t end = reinterpret_cast<uintptr_t>(data) + bytes;
    for (uintptr_t at = reinterpret_cast<uintptr_t>(data) / kPage * kPage; at < end; at += kStep) {
        const size_t size = std::min<size_t>(kStep, end - at), pages = (size + kPage - 1) / kPage;
        // mincore takes a tenth of the time of a madvise for pages that are in memory
        const bool known = mincore(reinterpret_cast<void*>(at), size, present) == 0;
        if (known && std::all_of(present, present + pages, [](auto page) { return page & 1; })) continue;
        madvise(reinterpret_cast<void*>(at), size, MADV_WILLNEED);
    }
}
#endif

#ifdef __linux__
void avoid_huge_pages(uint8_t* data, int64_t bytes) { madvise(data, (size_t)bytes, MADV_NOHUGEPAGE); }

std::vector<int> cpu_affinity() {
    std::vector<int> found;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
            if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
    return found;
}

void bind_to_cpus(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus)
        if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    if (!cpus.empty()) sched_setaffinity(0, sizeof set, &set);
}

bool request_amx() {
#ifdef __x86_64__
    constexpr long kRequestPermission = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#else
void avoid_huge_pages(uint8_t*, int64_t) {}

std::vector<int> cpu_affinity() { return {}; }

void bind_to_cpus(const std::vector<int>&) {}

bool request_amx() { return false; }
#endif

} // namespace headstart
