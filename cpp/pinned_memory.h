// PinnedMemory: one mapping whose pages are all there from the start, registered with the driver when there is one.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "driver.h"

namespace tensorrt_llm_ext {

// Owns a mapping. Huge pages are tried from the kernel's pool, then wished for.
class Mapping {
public:
    explicit Mapping(size_t num_bytes);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data = nullptr;
    size_t num_bytes = 0;
    bool is_huge = false;  // pages from the kernel's pool of huge pages
};

// Owns the driver's registration of a mapping: the device may read and write it.
class Registration {
public:
    Registration(std::shared_ptr<Driver> driver, const Mapping& mapping);
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

    DeviceAddress device_address() const;  // asked from the driver

private:
    std::shared_ptr<Driver> driver_;
    std::byte* data_;
};

class PinnedMemory {
public:
    // Maps at least `num_bytes` and touches every page. Throws Error (memory) with the bytes needed and free, and keeps
    // nothing then. `driver` may be null.
    PinnedMemory(size_t num_bytes, std::shared_ptr<Driver> driver);
    ~PinnedMemory();
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;

    std::byte* data() const { return parts_->mapping.data; }
    size_t num_bytes() const { return parts_->mapping.num_bytes; }
    bool is_huge() const { return parts_->mapping.is_huge; }
    DeviceAddress device_address() const { return device_address_; }  // without a driver, data() itself

    // Keep the mapping for ever: a device that hangs may still write to it. Counted.
    void abandon() noexcept;

private:
    struct Parts {
        explicit Parts(size_t num_bytes) : mapping(num_bytes) {}
        Mapping mapping;
        std::optional<Registration> registration;
    };

    std::unique_ptr<Parts> parts_;
    DeviceAddress device_address_;
    bool is_abandoned_ = false;
};

}  // namespace tensorrt_llm_ext
