// View: a read-only tensor inside a slot, without a copy; it keeps the slot alive. With the part of DLPack's ABI it speaks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arena.h"

namespace tensorrt_llm_ext {

struct View {
    SlotRef slot;
    std::byte* data;
    const Dtype* dtype;
    std::vector<int64_t> shape;
};

// Views of every input, or every output, of the batch in `slot`; calls visit(name, view).
template <class Visit>
void for_each_view(const SlotRef& slot, bool is_output, Visit visit) {
    slot->layout().for_each(slot->sizes(), [&](const Tensor& tensor, size_t offset, size_t) {
        if ((tensor.place == Place::output) != is_output) return;
        View view{slot, slot->data() + offset, tensor.dtype, {}};
        for (const Dimension& dimension : tensor.shape) view.shape.push_back(dimension.in(slot->sizes()));
        visit(tensor.name, std::move(view));
    });
}

// DLPack, as its specification lays it out: version 1.0 (with flags) and the form before it.
struct DlTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;  // null: C order
    uint64_t byte_offset;
};

struct DlManagedTensor {
    static constexpr const char* kName = "dltensor";
    DlTensor tensor;
    void* context;
    void (*deleter)(DlManagedTensor*);
};

struct DlManagedTensorVersioned {
    static constexpr const char* kName = "dltensor_versioned";
    uint32_t major, minor;
    void* context;
    void (*deleter)(DlManagedTensorVersioned*);
    uint64_t flags;
    DlTensor tensor;
};

inline constexpr int32_t kDlCpu = 1;
inline constexpr uint64_t kDlReadOnly = 1;

// A managed tensor that owns a copy of `view`, and so a reference to its slot. Freed by its own deleter.
template <class Managed>
Managed* dlpack_from_view(const View& view) {
    struct Owner {
        Managed managed{};
        View view;
    };
    auto* owner = new Owner{{}, view};
    const auto bits = static_cast<uint8_t>(8 * view.dtype->num_bytes);
    owner->managed.tensor = {view.data, kDlCpu, 0, static_cast<int32_t>(owner->view.shape.size()), view.dtype->dlpack_code, bits, 1,
                             owner->view.shape.data(), nullptr, 0};
    owner->managed.context = owner;
    owner->managed.deleter = [](Managed* managed) { delete static_cast<Owner*>(managed->context); };
    return &owner->managed;
}

}  // namespace tensorrt_llm_ext
