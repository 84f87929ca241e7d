#include "layout.h"

#include <algorithm>
#include <set>

#include "errors.h"
#include "pack.h"

namespace tensorrt_llm_ext {

namespace {

constexpr size_t kTooMany = size_t{1} << 60;  // bytes: more than any machine has, and far from overflow

// DLPack's codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 and 12 the float8 kinds.
constexpr Dtype kDtypes[] = {
    {"float32", 4, 2}, {"float16", 2, 2}, {"bfloat16", 2, 4}, {"float8_e4m3fn", 1, 10}, {"float8_e5m2", 1, 12},
    {"int32", 4, 0},   {"int64", 8, 0},   {"int8", 1, 0},     {"uint8", 1, 1},          {"bool", 1, 6},
};

Error refused(const std::string& name, const std::string& problem, const std::string& expected, const std::string& found) {
    return Error(Kind::plan, "tensor '" + name + "' of the engine " + problem, expected, found,
                 "build the engine with this release, or open it with a backend that names its tensors as the contract does");
}

std::string spelled(const std::vector<Dimension>& shape) {
    std::string text = "[";
    for (const Dimension& dimension : shape) {
        if (text.size() > 1) text += ", ";
        text += dimension.symbol ? std::string(1, dimension.symbol) : std::to_string(dimension.size);
    }
    return text + "]";
}

std::string known_inputs() {
    std::string names;
    for (const KnownInput& input : kKnownInputs) names += (names.empty() ? "" : ", ") + std::string(input.name);
    return names;
}

// 'L' in a known input's shape stands for any fixed size (one value a layer).
bool fits(const std::vector<Dimension>& shape, const std::string& pattern, int64_t fixed) {
    if (shape.size() != pattern.size()) return false;
    for (size_t i = 0; i < pattern.size(); ++i) {
        const bool is_fixed = pattern[i] == 'L' || pattern[i] == '#';
        if (is_fixed ? shape[i].symbol != 0 : shape[i].symbol != pattern[i]) return false;
        if (pattern[i] == '#' && shape[i].size != fixed) return false;
    }
    return true;
}

Tensor input_from_spec(const TensorSpec& spec) {
    const auto known = std::find_if(std::begin(kKnownInputs), std::end(kKnownInputs),
                                    [&](const KnownInput& input) { return spec.name == input.name; });
    if (known == std::end(kKnownInputs)) throw refused(spec.name, "is an input that cannot be filled", known_inputs(), spec.name);
    if (spec.dtype != known->dtype) throw refused(spec.name, "has another type than its name promises", known->dtype, spec.dtype);
    if (!fits(spec.shape, known->pattern, known->fixed_size)) {
        throw refused(spec.name, "has another shape than its name promises", known->shape, spelled(spec.shape));
    }
    const bool is_on_host = spec.name.rfind("host_", 0) == 0;  // upstream marks host tensors by name alone
    return {spec.name, is_on_host ? Place::host_input : Place::device_input, &dtype_named(spec.dtype), spec.shape, known->write};
}

}  // namespace

const Dtype& dtype_named(const std::string& name) {
    for (const Dtype& dtype : kDtypes) {
        if (name == dtype.name) return dtype;
    }
    std::string names;
    for (const Dtype& dtype : kDtypes) names += (names.empty() ? "" : ", ") + std::string(dtype.name);
    throw Error(Kind::plan, "'" + name + "' is not a type of tensor", names, name, "build the engine with one of these types");
}

int64_t Dimension::in(const Sizes& sizes) const {
    switch (symbol) {
        case 'T': return sizes.num_tokens;
        case 'B': return sizes.batch_size;
        case 'S': return sizes.longest;
        default: return size;
    }
}

size_t num_elements(const Tensor& tensor, const Sizes& sizes) {
    size_t elements = 1;
    for (const Dimension& dimension : tensor.shape) elements *= static_cast<size_t>(dimension.in(sizes));
    return elements;
}

Layout::Layout(const std::vector<TensorSpec>& specs, const Limits& limits) : limits_(limits) {
    std::set<std::string> names;
    for (const TensorSpec& spec : specs) {
        if (!names.insert(spec.name).second) throw refused(spec.name, "is named twice", "each name once", spec.name);
        for (const Dimension& dimension : spec.shape) {
            const bool is_known = dimension.symbol == 0 ? dimension.size >= 0 : std::string("TBS").find(dimension.symbol) != std::string::npos;
            if (!is_known) throw refused(spec.name, "has a shape that no batch decides", "sizes, and the symbols T, B, S", spelled(spec.shape));
        }
        if (spec.role == "input") tensors_.push_back(input_from_spec(spec));
        else if (spec.role == "output") tensors_.push_back({spec.name, Place::output, &dtype_named(spec.dtype), spec.shape, nullptr});
        else throw refused(spec.name, "has no role", "input or output", spec.role);
    }
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const Tensor& a, const Tensor& b) { return a.place < b.place; });
}

bool Layout::has_host_inputs() const { return !tensors_.empty() && tensors_.back().place == Place::host_input; }

bool Layout::has_gather_input() const {
    return std::any_of(tensors_.begin(), tensors_.end(), [](const Tensor& tensor) { return tensor.name == kGatherInput; });
}

size_t Layout::max_bytes(const Tensor& tensor) const {
    size_t num_bytes = tensor.dtype->num_bytes;
    const auto times = [&](int64_t factor) {
        if (__builtin_mul_overflow(num_bytes, static_cast<size_t>(factor), &num_bytes)) num_bytes = kTooMany;
    };
    bool has_batch = false, has_longest = false;
    for (const Dimension& dimension : tensor.shape) {
        if (dimension.symbol == 'B') has_batch = true;
        else if (dimension.symbol == 'S') has_longest = true;
        else times(dimension.symbol == 'T' ? limits_.max_num_tokens : dimension.size);
    }
    if (has_batch && has_longest) times(limits_.max_padded_tokens);  // bounded together
    else if (has_batch) times(limits_.max_batch_size);
    else if (has_longest) times(limits_.max_seq_len);
    return std::min(num_bytes, kTooMany);
}

size_t Layout::slot_bytes() const {
    size_t num_bytes = 2 * kStampBytes;
    for (const Tensor& tensor : tensors_) num_bytes = std::min(num_bytes + aligned(max_bytes(tensor)), kTooMany);
    return num_bytes;
}

Spans Layout::spans(const Sizes& sizes) const {
    return for_each(sizes, [](const Tensor&, size_t, size_t) {});
}

}  // namespace tensorrt_llm_ext
