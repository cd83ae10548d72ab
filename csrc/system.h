// What is not C++ but the operating system's: pages of memory, the CPUs of a thread, leave to use tiles.
#pragma once

#include <cstdint>
#include <vector>

namespace headstart {

uint8_t* map_pages(int64_t bytes);                // zeros that take no memory before they are touched; std::bad_alloc
void unmap_pages(uint8_t* data, int64_t bytes);
void keep_pages_small(uint8_t* data, int64_t bytes); // so that threads of several nodes can each have their own

std::vector<int> own_cpus();               // those that the calling thread may run on; none where nobody tells
void keep_to(const std::vector<int>& cpus); // binds the calling thread; it stays free where none of these can be had

bool may_use_tiles(); // Linux keeps their 8 KiB of state for who has asked

} // namespace headstart
