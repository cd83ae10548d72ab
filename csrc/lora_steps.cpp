// Recorded steps of low-rank adapters (Ops.adapted_linear of headstart/kernels/ops.py): for each row of an adapter,
// y += B (A x). A x is summed over parts of kPart inputs, whose sums are added in order: threads share one row's work
// without changing a bit of the result.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "program.h"

namespace headstart {
namespace {

constexpr int64_t kPart = 256;    // inputs summed by one task
constexpr int64_t kSegment = 512; // outputs of one task
constexpr int64_t kRowBlock = 16; // rows of one task

using Factor = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

int64_t parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

struct Adapter {
    int64_t rank = 0;    // 0: the matrix is not adapted
    std::vector<float> a; // [in][rank]
    std::vector<float> b; // segments of kSegment outputs, each [rank][outputs]
};

// The adapters of one matrix [num_out, num_in], by slot.
struct LoraTable {
    LoraTable(int64_t num_in, int64_t num_out, const std::vector<std::optional<std::pair<Factor, Factor>>>& pairs);
    int64_t num_in, num_out, rank = 0; // rank: the largest one
    std::vector<Adapter> slots;
};

LoraTable::LoraTable(int64_t num_in, int64_t num_out, const std::vector<std::optional<std::pair<Factor, Factor>>>& pairs)
    : num_in(num_in), num_out(num_out), slots(pairs.size()) {
    for (size_t slot = 0; slot < pairs.size(); ++slot) {
        if (!pairs[slot]) continue;
        const Factor &a = pairs[slot]->first, &b = pairs[slot]->second;
        Adapter& to = slots[slot];
        to.rank = (int64_t)a.shape(0);
        require(to.rank > 0 && (int64_t)a.shape(1) == num_in && (int64_t)b.shape(0) == num_out &&
                    (int64_t)b.shape(1) == to.rank,
                "LoraTable: A must be [rank, in] and B [out, rank]");
        rank = std::max(rank, to.rank);
        to.a.resize(num_in * to.rank);
        for (int64_t i = 0; i < num_in; ++i)
            for (int64_t k = 0; k < to.rank; ++k) to.a[i * to.rank + k] = a.data()[k * num_in + i];
        to.b.resize(num_out * to.rank);
        float* next = to.b.data();
        for (int64_t begin = 0; begin < num_out; begin += kSegment)
            for (int64_t k = 0; k < to.rank; ++k)
                for (int64_t o = begin; o < std::min(begin + kSegment, num_out); ++o) *next++ = b.data()[o * to.rank + k];
    }
}

// Calls use(row, adapter) for the rows of a block that have an adapter for this matrix.
template <class Use> void for_rows(const Program& program, const Pass& pass, int x, const LoraTable& table, int64_t block, Use use) {
    if (!pass.adapter_slots) return;
    const int64_t end = std::min((block + 1) * kRowBlock, program.rows(x, pass));
    for (int64_t row = block * kRowBlock; row < end; ++row) {
        const int32_t slot = pass.adapter_slots[program.buffers[x].logits ? pass.logit_rows[row] : row];
        if (slot >= 0 && slot < (int64_t)table.slots.size() && table.slots[slot].rank) use(row, table.slots[slot]);
    }
}

// Sums of A x over parts of the inputs -> buffer [R, parts * rank], for `lora_expand`.
int lora_shrink(Program& program, int x, nb::object owner) {
    const LoraTable* table = nb::cast<const LoraTable*>(owner);
    require(program.buffers[x].width == table->num_in, "lora_shrink: the input width differs from the adapters' columns");
    const int64_t parts = parts_of(table->num_in, kPart);
    const int out = program.buffer(parts * std::max<int64_t>(table->rank, 1), program.buffers[x].logits);
    Step step;
    step.label = "adapters";
    step.reads = {x};
    step.writes = {out};
    step.owners = {owner};
    step.num_tasks = [&program, x, parts](const Pass& pass) { return parts * parts_of(program.rows(x, pass), kRowBlock); };
    step.run = [&program, table, x, out, parts](const Pass& pass, int64_t task) {
        const int64_t part = task % parts, first = part * kPart, count = std::min(kPart, table->num_in - first);
        for_rows(program, pass, x, *table, task / parts, [&](int64_t row, const Adapter& adapter) {
            program.kernels.sum_streams(adapter.a.data() + first * adapter.rank, program.values(x, row) + first, count,
                                        adapter.rank, program.values(out, row) + part * table->rank);
        });
    };
    program.add(std::move(step));
    return out;
}

// Adds B (A x) to y in place. sums: buffer of `lora_shrink`.
void lora_expand(Program& program, int y, int sums, nb::object owner) {
    const LoraTable* table = nb::cast<const LoraTable*>(owner);
    require(program.buffers[y].width == table->num_out, "lora_expand: the output width differs from the adapters' rows");
    const int64_t parts = parts_of(table->num_in, kPart), segments = parts_of(table->num_out, kSegment);
    Step step;
    step.label = "adapters";
    step.reads = {y, sums};
    step.writes = {y};
    step.owners = {owner};
    step.num_tasks = [&program, y, segments](const Pass& pass) {
        return segments * parts_of(program.rows(y, pass), kRowBlock);
    };
    step.run = [&program, table, y, sums, parts, segments](const Pass& pass, int64_t task) {
        const int64_t first = task % segments * kSegment, count = std::min(kSegment, table->num_out - first);
        thread_local std::vector<float> inner;
        float added[kSegment];
        for_rows(program, pass, y, *table, task / segments, [&](int64_t row, const Adapter& adapter) {
            const float* part = program.values(sums, row);
            inner.assign(part, part + adapter.rank);
            for (int64_t p = 1; p < parts; ++p)
                for (int64_t k = 0; k < adapter.rank; ++k) inner[k] += part[p * table->rank + k];
            float* to = program.values(y, row) + first;
            program.kernels.sum_streams(adapter.b.data() + first * adapter.rank, inner.data(), adapter.rank, count, added);
            program.kernels.add(to, added, count, to);
        });
    };
    program.add(std::move(step));
}

} // namespace

void bind_lora_steps(nb::module_& m, nb::class_<Program>& program) {
    nb::class_<LoraTable>(m, "LoraTable")
        .def(nb::init<int64_t, int64_t, const std::vector<std::optional<std::pair<Factor, Factor>>>&>(), nb::arg("num_in"),
             nb::arg("num_out"), nb::arg("pairs"));
    program.def("lora_shrink", lora_shrink).def("lora_expand", lora_expand);
}

} // namespace headstart
