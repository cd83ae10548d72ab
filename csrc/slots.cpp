// Byte views of a pool's slots, for spilling KV blocks to files.
#include <stdexcept>

#include "program.h"

namespace headstart {

nb::ndarray<nb::numpy, uint8_t> slots_of(nb::handle owner, const Memory& memory, int64_t slot_bytes, int64_t step,
                                         int64_t first, int64_t count) {
    const bool inside = first >= 0 && count >= 0 && first <= INT64_MAX / 2 && count <= INT64_MAX / 2 &&
                        (!slot_bytes || first + count <= memory.size() / slot_bytes);
    if (!inside || first % step || count % step)
        throw std::invalid_argument("no such slots: the range is outside the pool, or not whole blocks");
    const size_t shape[1] = {(size_t)(count * slot_bytes)};
    return {memory.data() + first * slot_bytes, 1, shape, owner};
}

} // namespace headstart
