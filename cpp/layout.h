// Layout: where the engine's tensors lie in a slot, as a pure function of the batch's sizes.
//
//   slot:    [ device inputs | stamp ][ returned stamp | outputs ][ host inputs ]
//   device:  [ device inputs | stamp                   | outputs ]
//
// One copy takes the first bracket to the device, one copy brings stamp and outputs back. The stamp names the batch: what
// comes back carries the identity of what went in, through the same stream and the same memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tensorrt_llm_ext {

inline constexpr size_t kAlignment = 256;  // what TensorRT asks of an address

struct Dtype {
    const char* name;  // NumPy's, or ml_dtypes'
    size_t num_bytes;
    uint8_t dlpack_code;
};

struct Sizes {
    int32_t num_tokens = 0;  // T
    int32_t batch_size = 0;  // B
    int32_t longest = 0;     // S
};

struct Limits {
    int64_t vocab_size;
    int64_t max_num_tokens;
    int64_t max_batch_size;
    int64_t max_seq_len;
    int64_t max_padded_tokens;  // of B x S
};

struct Dimension {
    char symbol;   // 'T', 'B', 'S', or 0 for a fixed size
    int64_t size;  // when fixed

    int64_t in(const Sizes& sizes) const;
};

struct PackedIds;
using Writer = void (*)(const PackedIds&, void* out, size_t num_elements);

enum class Place { device_input, output, host_input };

struct Tensor {
    std::string name;
    Place place;
    const Dtype* dtype;
    std::vector<Dimension> shape;
    Writer write;  // inputs: fills the values
};

// What travels with a batch through the stream.
struct Stamp {
    uint64_t batch;
    std::array<uint8_t, 16> digest;
    Sizes sizes;
};
inline constexpr size_t kStampBytes = kAlignment;
static_assert(sizeof(Stamp) <= kStampBytes);

// Offsets within a slot, in bytes.
struct Spans {
    size_t stamp, returned_stamp, outputs, host_inputs, end;

    size_t copy_in_bytes() const { return stamp + kStampBytes; }
    size_t copy_out_bytes() const { return host_inputs - returned_stamp; }
    size_t device_bytes() const { return host_inputs - kStampBytes; }
};

// What an engine says of a tensor: a size of the shape is a number or one of "T", "B", "S".
struct TensorSpec {
    std::string name, role, dtype;
    std::vector<Dimension> shape;
};

class Layout {
public:
    // Throws Error (plan) for a tensor that cannot be laid out, or an input that pack cannot fill, with the list of those it can.
    Layout(const std::vector<TensorSpec>& specs, const Limits& limits);

    const std::vector<Tensor>& tensors() const { return tensors_; }  // in the order they lie
    const Limits& limits() const { return limits_; }
    bool has_host_inputs() const;
    bool has_gather_input() const;
    size_t slot_bytes() const;  // holds every batch within the limits

    Spans spans(const Sizes& sizes) const;

    // Calls visit(tensor, offset, num_elements) for every tensor of `sizes`, in the order they lie.
    template <class Visit>
    Spans for_each(const Sizes& sizes, Visit visit) const;

private:
    size_t max_bytes(const Tensor& tensor) const;

    Limits limits_;
    std::vector<Tensor> tensors_;
};

inline size_t aligned(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t num_elements(const Tensor& tensor, const Sizes& sizes);

const Dtype& dtype_named(const std::string& name);

template <class Visit>
Spans Layout::for_each(const Sizes& sizes, Visit visit) const {
    Spans spans{};
    size_t offset = 0;
    Place place = Place::device_input;
    auto enter = [&](Place next) {
        if (place == Place::device_input && next != place) {
            spans.stamp = offset;
            spans.returned_stamp = offset + kStampBytes;
            spans.outputs = offset += 2 * kStampBytes;
            place = Place::output;
        }
        if (place == Place::output && next != place) {
            spans.host_inputs = offset;
            place = next;
        }
    };
    for (const Tensor& tensor : tensors_) {
        enter(tensor.place);
        const size_t elements = num_elements(tensor, sizes);
        visit(tensor, offset, elements);
        offset += aligned(elements * tensor.dtype->num_bytes);
    }
    enter(Place::host_input);
    spans.end = offset;
    return spans;
}

}  // namespace tensorrt_llm_ext
