#include "pack.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace tensorrt_llm_ext {

namespace {

int32_t* int32(void* out) { return static_cast<int32_t*>(out); }

// Calls visit(sequence, its first row in the batch, its length) for every sequence.
template <class Visit>
void for_each_sequence(const PackedIds& ids, Visit visit) {
    for (int32_t i = 0; i < ids.sizes.batch_size; ++i) {
        visit(i, ids.offsets[i] - ids.offsets[0], ids.offsets[i + 1] - ids.offsets[i]);
    }
}

void count_up(int32_t* out, int32_t first, int32_t count) {
    for (int32_t i = 0; i < count; ++i) out[i] = first + i;
}

void write_input_ids(const PackedIds& ids, void* out, size_t num_elements) {
    std::memcpy(out, ids.token_ids + ids.offsets[0], num_elements * sizeof(int32_t));
}

void write_position_ids(const PackedIds& ids, void* out, size_t) {
    for_each_sequence(ids, [&](int32_t, int32_t first, int32_t length) { count_up(int32(out) + first, 0, length); });
}

// [B, S]: the packed row of every padded slot. A slot past the end is its own sequence's last row, never another's: causal
// attention ignores it for every real query, but a NaN there would leak.
void write_attention_rows(const PackedIds& ids, void* out, size_t) {
    const int32_t longest = ids.sizes.longest;
    for_each_sequence(ids, [&](int32_t i, int32_t first, int32_t length) {
        int32_t* row = int32(out) + static_cast<int64_t>(i) * longest;
        count_up(row, first, length);
        std::fill(row + length, row + longest, first + length - 1);
    });
}

// [T]: the flat padded slot of every packed row.
void write_packed_slots(const PackedIds& ids, void* out, size_t) {
    for_each_sequence(ids, [&](int32_t i, int32_t first, int32_t length) { count_up(int32(out) + first, i * ids.sizes.longest, length); });
}

void write_lengths(const PackedIds& ids, void* out, size_t) {
    for_each_sequence(ids, [&](int32_t i, int32_t, int32_t length) { int32(out)[i] = length; });
}

// [B]: the one place that computes gather indices, for both conventions.
void write_last_token_ids(const PackedIds& ids, void* out, size_t num_elements) {
    if (ids.given_last_token_ids) {
        std::memcpy(out, ids.given_last_token_ids, num_elements * sizeof(int32_t));
        return;
    }
    const int32_t minus = ids.convention == Convention::index ? 1 : 0;
    for_each_sequence(ids, [&](int32_t i, int32_t first, int32_t length) { int32(out)[i] = first + length - minus; });
}

void write_zeros(const PackedIds&, void* out, size_t num_elements) { std::fill_n(int32(out), num_elements, 0); }
void write_zeros_64(const PackedIds&, void* out, size_t num_elements) { std::fill_n(static_cast<int64_t*>(out), num_elements, 0); }
void write_off_64(const PackedIds&, void* out, size_t num_elements) { std::fill_n(static_cast<int64_t*>(out), num_elements, -1); }

// A window below the longest sequence would switch upstream's attention to a sliding window.
void write_windows(const PackedIds& ids, void* out, size_t num_elements) {
    std::fill_n(int32(out), num_elements, static_cast<int32_t>(ids.max_seq_len));
}

Error bad_batch(const std::string& what, const std::string& expected, const std::string& found) {
    return Error(Kind::plan, what, expected, found, "form batches with runtime.batches(items, session.contract.limits)");
}

void check_limit(const char* what, int64_t found, int64_t limit) {
    if (found > limit) throw bad_batch(std::string("the batch has too many ") + what, "at most " + std::to_string(limit), std::to_string(found));
}

void check_offsets(const int32_t* offsets, int64_t batch_size, int64_t num_ids) {
    if (batch_size < 1) throw bad_batch("the batch is empty", "at least 1 sequence", std::to_string(batch_size));
    if (offsets[0] < 0 || offsets[batch_size] > num_ids) {
        throw bad_batch("the offsets leave the token ids", "0 <= offset <= " + std::to_string(num_ids),
                        std::to_string(offsets[0]) + " to " + std::to_string(offsets[batch_size]));
    }
    for (int64_t i = 0; i < batch_size; ++i) {
        if (offsets[i + 1] <= offsets[i]) {
            throw bad_batch("sequence " + std::to_string(i) + " is empty or runs backwards", "offsets that rise",
                            std::to_string(offsets[i]) + " then " + std::to_string(offsets[i + 1]));
        }
    }
}

void check_vocabulary(const int32_t* token_ids, int64_t count, int64_t vocab_size) {
    uint32_t largest = 0;  // a negative id becomes the largest of all
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(token_ids[i]));
    if (largest < vocab_size) return;
    const auto* bad = std::find_if(token_ids, token_ids + count, [&](int32_t id) { return id < 0 || id >= vocab_size; });
    throw bad_batch("token " + std::to_string(bad - token_ids) + " of the batch is outside the vocabulary",
                    "0 to " + std::to_string(vocab_size - 1), std::to_string(*bad));
}

void check_gather(const Layout& layout, const PackedIds& ids) {
    if (!layout.has_gather_input()) return;
    if (!ids.given_last_token_ids) {
        if (ids.convention == Convention::none) {
            throw bad_batch("the engine reads last_token_ids, and its convention is not known", "prefix_sum or index", "none");
        }
        return;
    }
    for (int32_t i = 0; i < ids.sizes.batch_size; ++i) {
        const int32_t value = ids.given_last_token_ids[i];
        if (value < 0 || value > ids.sizes.num_tokens) {
            throw bad_batch("last_token_ids[" + std::to_string(i) + "] leaves the batch",
                            "0 to " + std::to_string(ids.sizes.num_tokens), std::to_string(value));
        }
    }
}

}  // namespace

const KnownInput kKnownInputs[13] = {
    {"input_ids", "int32", "T", 0, "[T]", write_input_ids},
    {"position_ids", "int32", "T", 0, "[T]", write_position_ids},
    {"attention_rows", "int32", "BS", 0, "[B, S]", write_attention_rows},
    {"packed_slots", "int32", "T", 0, "[T]", write_packed_slots},
    {kGatherInput, "int32", "B", 0, "[B]", write_last_token_ids},
    {"sequence_lengths", "int32", "B", 0, "[B]", write_lengths},
    // TensorRT-LLM's, for a batch that is all prefill (reference: its attention plugin reads the host_* ones at enqueue)
    {"context_lengths", "int32", "B", 0, "[B]", write_lengths},
    {"host_context_lengths", "int32", "B", 0, "[B]", write_lengths},
    {"host_request_types", "int32", "B", 0, "[B]", write_zeros},
    {"host_max_attention_window_sizes", "int32", "L", 0, "[layers]", write_windows},
    {"host_sink_token_length", "int32", "#", 1, "[1]", write_zeros},
    {"host_runtime_perf_knobs", "int64", "#", 16, "[16]", write_off_64},
    {"host_context_progress", "int64", "#", 1, "[1]", write_zeros_64},  // a pointer to upstream: anything but 0 crashes
};

Sizes sizes_of(const int32_t* offsets, int64_t batch_size) {
    Sizes sizes{offsets[batch_size] - offsets[0], static_cast<int32_t>(batch_size), 0};
    for (int64_t i = 0; i < batch_size; ++i) sizes.longest = std::max(sizes.longest, offsets[i + 1] - offsets[i]);
    return sizes;
}

void pack(std::shared_ptr<const Layout> layout, const PackedIds& given, int64_t num_ids, Slot& slot, uint64_t batch,
          const std::array<uint8_t, 16>& digest) {
    const Limits& limits = layout->limits();
    PackedIds ids = given;
    check_offsets(ids.offsets, ids.sizes.batch_size, num_ids);
    ids.sizes = sizes_of(ids.offsets, ids.sizes.batch_size);
    ids.max_seq_len = limits.max_seq_len;
    check_limit("tokens", ids.sizes.num_tokens, limits.max_num_tokens);
    check_limit("sequences", ids.sizes.batch_size, limits.max_batch_size);
    check_limit("tokens in one sequence", ids.sizes.longest, limits.max_seq_len);
    check_limit("padded tokens", int64_t{ids.sizes.batch_size} * ids.sizes.longest, limits.max_padded_tokens);
    check_vocabulary(ids.token_ids + ids.offsets[0], ids.sizes.num_tokens, limits.vocab_size);
    check_gather(*layout, ids);

    const Spans spans = layout->spans(ids.sizes);
    slot.begin(layout, {batch, digest, ids.sizes}, spans);  // the slot is ours, large enough, and in nobody's view
    layout->for_each(ids.sizes, [&](const Tensor& tensor, size_t offset, size_t num_elements) {
        if (tensor.write) tensor.write(ids, slot.data() + offset, num_elements);
    });
}

}  // namespace tensorrt_llm_ext
