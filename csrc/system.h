// Operating-system functions: memory pages, CPU affinity, permission for AMX tiles.
#pragma once

#include <cstdint>
#include <vector>

namespace headstart {

uint8_t* map_pages(int64_t bytes);                // zeroed, allocated at first touch; throws std::bad_alloc
void unmap_pages(uint8_t* data, int64_t bytes);
void avoid_huge_pages(uint8_t* data, int64_t bytes); // no huge pages, so that NUMA nodes can share the range page by page
void read_ahead(const uint8_t* data, int64_t bytes); // starts to read a mapped file's pages that are not in memory

std::vector<int> cpu_affinity();               // the calling thread's CPU affinity; empty if unknown
void bind_to_cpus(const std::vector<int>& cpus); // binds the calling thread, if the system allows it

bool request_amx(); // requests permission: Linux then saves 8 KiB of state per thread

} // namespace headstart
