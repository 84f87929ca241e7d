// pack: one array of token ids and offsets to every index array of a batch, straight into a slot.
#pragma once

#include <cstdint>
#include <memory>

#include "arena.h"
#include "layout.h"

namespace tensorrt_llm_ext {

// How the engine reads last_token_ids: 1-based inclusive prefix sum, 0-based index, or not at all.
enum class Convention { prefix_sum, index, none };

// A batch as the writers see it. Sequence i is token_ids[offsets[i] : offsets[i + 1]].
struct PackedIds {
    const int32_t* token_ids;
    const int32_t* offsets;  // [batch_size + 1]
    Sizes sizes;
    Convention convention;
    const int32_t* given_last_token_ids;  // [batch_size], or null: measuring the convention feeds values of its own
    int64_t max_seq_len;
};

// An input that pack fills, known by its name. `pattern` is its shape in symbols: T, B, S, L for any fixed size, # for fixed_size.
struct KnownInput {
    const char* name;
    const char* dtype;
    const char* pattern;
    int64_t fixed_size;
    const char* shape;  // for messages
    Writer write;
};

extern const KnownInput kKnownInputs[13];
inline constexpr const char* kGatherInput = "last_token_ids";

// Fills every input of `layout` in `slot` and remembers the batch there. `num_ids` is the length of token_ids.
// Throws Error (plan) for ids, offsets or a batch outside the layout's limits, and for a slot that was used since it was acquired.
void pack(std::shared_ptr<const Layout> layout, const PackedIds& ids, int64_t num_ids, Slot& slot, uint64_t batch,
          const std::array<uint8_t, 16>& digest);

// The sizes of a batch with these offsets.
Sizes sizes_of(const int32_t* offsets, int64_t batch_size);

}  // namespace tensorrt_llm_ext
