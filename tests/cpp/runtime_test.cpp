// The classes of cpp/ without Python, for the sanitizers and for counting allocations. Usage: runtime_test STAND_IN_DRIVER
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stream.h"
#include "host_stream.h"
#include "pack.h"
#include "view.h"

using namespace tensorrt_llm_ext;
using namespace std::chrono_literals;

// ---- allocations, counted while is_counting, without those of the stand-in ----

namespace {

std::atomic<bool> is_counting{false};
std::atomic<long> num_allocations{0};
const void* stand_in_base = nullptr;

void count(const void* caller) {
    if (!is_counting) return;
    Dl_info info;
    if (dladdr(caller, &info) && info.dli_fbase == stand_in_base) return;
    ++num_allocations;
}

}  // namespace

#ifdef COUNT_ALLOCATIONS
extern "C" void* __libc_malloc(size_t);
extern "C" void* malloc(size_t size) {
    count(__builtin_return_address(0));
    return __libc_malloc(size);
}
void* operator new(size_t size) {
    count(__builtin_return_address(0));
    return __libc_malloc(size);
}
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, size_t) noexcept { std::free(pointer); }
#endif

// ---- a small engine ----

namespace {

#define CHECK(condition) \
    if (!(condition)) std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), std::abort()

constexpr auto kPatience = 30s;
constexpr std::array<uint8_t, 16> kDigest{1, 2, 3};

struct StandIn {
    explicit StandIn(const char* path) : library(dlopen(path, RTLD_NOW)) {
        CHECK(library);
        Dl_info info;
        CHECK(dladdr(dlsym(library, "cuInit"), &info));
        stand_in_base = info.dli_fbase;
    }
    template <class Function>
    Function* function(const char* name) const {
        return reinterpret_cast<Function*>(dlsym(library, name));
    }
    void* library;
};

Clock::time_point soon() { return Clock::now() + kPatience; }

std::shared_ptr<Layout> small_layout() {
    const std::vector<TensorSpec> specs = {
        {"input_ids", "input", "int32", {{'T', 0}}},       {"position_ids", "input", "int32", {{'T', 0}}},
        {"attention_rows", "input", "int32", {{'B', 0}, {'S', 0}}}, {"last_token_ids", "input", "int32", {{'B', 0}}},
        {"all", "output", "int32", {{'T', 0}}},            {"host_request_types", "input", "int32", {{'B', 0}}},
    };
    return std::make_shared<Layout>(specs, Limits{1000, 256, 16, 64, 512});
}

// out[t] = 3 * input_ids[t] + position_ids[t], read and written where `resolve` finds the addresses.
struct Job {
    uintptr_t ids, positions, out;
    int32_t num_tokens;
    void* (*resolve)(unsigned long long, size_t);

    void run() const {
        const size_t bytes = sizeof(int32_t) * static_cast<size_t>(num_tokens);
        const auto* id = static_cast<const int32_t*>(resolve(ids, bytes));
        const auto* position = static_cast<const int32_t*>(resolve(positions, bytes));
        auto* row = static_cast<int32_t*>(resolve(out, bytes));
        for (int32_t t = 0; t < num_tokens; ++t) row[t] = 3 * id[t] + position[t];
    }
};

struct Rig {
    const StandIn* stand_in = nullptr;
    std::atomic<uint64_t> batches{0};
    Job jobs[16];  // one a slot: nothing is allocated for a launch
    std::shared_ptr<Layout> layout = small_layout();
    std::shared_ptr<Driver> driver;
    std::shared_ptr<PinnedArena> arena;
    Stream* running_on = nullptr;
    std::shared_ptr<Stream> stream;  // dies first: its worker may still call forward

    Rig(const StandIn* stand_in, const char* path, size_t num_slots, uint32_t first_value = 0) : stand_in(stand_in) {
        if (stand_in) driver = std::make_shared<Driver>(path);
        arena = PinnedArena::open(layout->slot_bytes(), num_slots, driver);
        if (stand_in) stream = std::make_shared<CudaStream>(driver, layout->slot_bytes(), first_value);
        else stream = std::make_shared<HostStream>(first_value);
        running_on = stream.get();
    }

    SlotRef packed(const std::vector<int32_t>& ids, const std::vector<int32_t>& offsets) {
        SlotRef slot = arena->acquire(soon());
        CHECK(slot);
        PackedIds batch{ids.data(), offsets.data(), {}, Convention::index, nullptr, 0};
        batch.sizes.batch_size = static_cast<int32_t>(offsets.size()) - 1;
        pack(layout, batch, static_cast<int64_t>(ids.size()), *slot, batches++, kDigest);
        return slot;
    }

    static void nothing(void*, const SlotRef&) {}
    static void keep(void*) {}
    static void forward(void* self, const SlotRef& slot) { static_cast<Rig*>(self)->launch(slot); }

    void launch(const SlotRef& slot) {
        Job& job = jobs[slot->index()];
        job = {0, 0, 0, slot->sizes().num_tokens, stand_in ? stand_in->function<void*(unsigned long long, size_t)>("stand_in_resolve") : in_place};
        layout->for_each(slot->sizes(), [&](const Tensor& tensor, size_t offset, size_t) {
            const uintptr_t address = running_on->image(*slot) + offset - (tensor.place == Place::output ? running_on->output_shift() : 0);
            if (tensor.name == "input_ids") job.ids = address;
            if (tensor.name == "position_ids") job.positions = address;
            if (tensor.name == "all") job.out = address;
        });
        if (!stand_in) return job.run();
        const auto launch_on = stand_in->function<int(void*, void (*)(void*), void*)>("stand_in_launch");
        launch_on(reinterpret_cast<void*>(running_on->handle()), [](void* given) { static_cast<Job*>(given)->run(); }, &job);
    }

    static void* in_place(unsigned long long address, size_t) { return reinterpret_cast<void*>(address); }

    Ticket enqueue(const SlotRef& slot, Call::Invoke engine = forward) {
        stream->run(slot, Call(this, nothing, keep));
        stream->copy_in(slot);
        stream->run(slot, Call(this, engine, keep));
        stream->copy_out(slot);
        return stream->ring(slot);
    }

    void check(const Ticket& ticket, const std::vector<int32_t>& ids) const {
        CHECK(ticket.slot()->returned_stamp().batch == ticket.batch() && ticket.slot()->returned_stamp().digest == kDigest);
        const std::byte* rows = nullptr;
        const std::byte* positions = nullptr;
        layout->for_each(ticket.slot()->sizes(), [&](const Tensor& tensor, size_t offset, size_t) {
            if (tensor.place == Place::output) rows = ticket.slot()->data() + offset;
            if (tensor.name == "position_ids") positions = ticket.slot()->data() + offset;
        });
        for (size_t t = 0; t < ids.size(); ++t) {
            int32_t row, position;
            std::memcpy(&row, rows + 4 * t, 4);
            std::memcpy(&position, positions + 4 * t, 4);
            CHECK(row == 3 * ids[t] + position);
        }
    }
};

struct Batch {
    std::vector<int32_t> ids, offsets{0};
    explicit Batch(unsigned seed) {
        for (unsigned i = 0; i < 1 + seed % 7; ++i) offsets.push_back(offsets.back() + 1 + static_cast<int32_t>((seed * 31 + i * 17) % 30));
        for (int32_t t = 0; t < offsets.back(); ++t) ids.push_back(static_cast<int32_t>((seed * 7919u + static_cast<unsigned>(t) * 104729u) % 1000));
    }
};

// ---- scenes ----

using MakeRig = std::function<std::unique_ptr<Rig>(size_t num_slots, uint32_t first_value)>;

void batches_come_back(const MakeRig& make) {
    for (uint32_t first_value : {0u, 0x7ffffff0u, 0xfffffff0u}) {
        auto rig = make(3, first_value);
        std::vector<std::pair<Ticket, Batch>> in_flight;
        for (unsigned step = 0; step < 100; ++step) {
            Batch batch(step);
            in_flight.emplace_back(rig->enqueue(rig->packed(batch.ids, batch.offsets)), batch);
            if (in_flight.size() < 3) continue;
            CHECK(in_flight.front().first.wait(soon()));
            rig->check(in_flight.front().first, in_flight.front().second.ids);
            std::vector<std::pair<Ticket, Batch>> rest;
            for (size_t i = 1; i < in_flight.size(); ++i) rest.push_back(std::move(in_flight[i]));
            in_flight.swap(rest);
        }
        for (auto& [ticket, batch] : in_flight) {
            CHECK(ticket.wait(soon()));
            rig->check(ticket, batch.ids);
        }
        in_flight.clear();
        rig->stream->close(soon());
    }
}

void threads_share_streams(const MakeRig& make) {
    auto first = make(4, 0), second = make(4, 0);
    std::mutex locks[2];
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            Rig& rig = t % 2 ? *first : *second;
            for (unsigned step = 0; step < 40; ++step) {
                Batch batch(1000 * t + step);
                const SlotRef slot = rig.packed(batch.ids, batch.offsets);
                std::unique_lock lock(locks[t % 2]);  // a session keeps the verbs of one batch together
                Ticket ticket = rig.enqueue(slot);
                lock.unlock();
                if (step % 5 == 4) continue;  // dropped without a wait
                CHECK(ticket.wait(soon()));
                rig.check(ticket, batch.ids);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    for (Rig* rig : {first.get(), second.get()}) rig->stream->close(soon());
}

void a_slot_outlives_its_makers(const MakeRig& make) {
    auto rig = make(2, 0);
    Batch batch(5);
    SlotRef slot = rig->packed(batch.ids, batch.offsets);
    {
        Ticket ticket = rig->enqueue(slot);
        CHECK(ticket.wait(soon()));
    }
    rig->stream->close(soon());
    rig.reset();
    auto* tensor = dlpack_from_view<DlManagedTensor>(View{slot, slot->data(), &dtype_named("int32"), {1}});
    slot = {};
    CHECK(*static_cast<int32_t*>(tensor->tensor.data) == batch.ids[0]);
    tensor->deleter(tensor);
}

void a_failing_call_ends_the_stream(const MakeRig& make) {
    auto rig = make(4, 0);
    if (rig->stand_in) return;
    Batch batch(3);
    const SlotRef bad = rig->packed(batch.ids, batch.offsets);
    bool has_failed = false;
    try {
        rig->stream->copy_in(bad);
        rig->stream->run(bad, Call(rig.get(), [](void*, const SlotRef&) { throw Error(Kind::backend, "broke", "a", "b", "c"); }, Rig::keep));
        rig->stream->copy_out(bad);
        Ticket ticket = rig->stream->ring(bad);
        ticket.wait(soon());
    } catch (const Error& error) {
        has_failed = error.kind == Kind::backend || error.kind == Kind::closed;
    }
    CHECK(has_failed);
    rig->stream->close(soon());
}

void closing_over_queued_work_drops_it(const MakeRig& make) {
    auto rig = make(4, 0);
    std::vector<Ticket> tickets;
    for (unsigned step = 0; step < 4; ++step) {
        Batch batch(step);
        tickets.push_back(rig->enqueue(rig->packed(batch.ids, batch.offsets)));
    }
    std::thread waiter([&] {
        try {
            tickets.back().wait(soon());
        } catch (const Error& error) {
            CHECK(error.kind == Kind::closed);
        }
    });
    rig->stream->close(soon());
    waiter.join();
}

void nothing_is_closed_by_hand(const MakeRig& make) {
    auto rig = make(2, 0);
    Batch batch(9);
    for (int i = 0; i < 2; ++i) rig->enqueue(rig->packed(batch.ids, batch.offsets), Rig::nothing);  // what runs must not need the rig
}

void an_armed_stream_waits(const MakeRig& make) {
    auto rig = make(2, 0x7fffffffu);
    if (rig->layout->has_host_inputs()) rig->layout = std::make_shared<Layout>(std::vector<TensorSpec>{{"input_ids", "input", "int32", {{'T', 0}}}, {"position_ids", "input", "int32", {{'T', 0}}}, {"all", "output", "int32", {{'T', 0}}}}, Limits{1000, 256, 16, 64, 512});
    for (unsigned step = 0; step < 4; ++step) {
        Batch batch(step);
        const SlotRef slot = rig->packed(batch.ids, batch.offsets);
        rig->stream->arm(slot, true);
        Ticket ticket = rig->enqueue(slot);
        CHECK(!ticket.wait(Clock::now() + 5ms));
        rig->stream->release();
        CHECK(ticket.wait(soon()));
        rig->check(ticket, batch.ids);
    }
    rig->stream->close(soon());
}

void the_hot_path_allocates_nothing(const MakeRig& make) {
    auto rig = make(2, 0);
    std::vector<Batch> batches;
    for (unsigned seed = 0; seed < 50; ++seed) batches.emplace_back(seed);
    auto once = [&](const Batch& batch) {
        Ticket ticket = rig->enqueue(rig->packed(batch.ids, batch.offsets));
        CHECK(ticket.wait(soon()));
        rig->check(ticket, batch.ids);
    };
    once(batches[0]);
    is_counting = true;
    for (const Batch& batch : batches) once(batch);
    is_counting = false;
    rig->stream->close(soon());
}

}  // namespace

int main(int, char** arguments) {
    const char* path = arguments[1];
    const StandIn stand_in(path);
    for (const bool is_host : {true, false}) {
        const MakeRig make = [&](size_t num_slots, uint32_t first_value) {
            return std::make_unique<Rig>(is_host ? nullptr : &stand_in, path, num_slots, first_value);
        };
        for (const auto& scene : {batches_come_back, threads_share_streams, a_slot_outlives_its_makers, a_failing_call_ends_the_stream,
                                  closing_over_queued_work_drops_it, nothing_is_closed_by_hand, an_armed_stream_waits, the_hot_path_allocates_nothing}) {
            scene(make);
        }
    }
    char text[4096];
    const int num_violations = stand_in.function<int(char*, size_t)>("stand_in_violations")(text, sizeof(text));
    std::printf("allocations %ld, violations %d, slots %ld, tickets %ld, streams %ld, mapped %ld, device %ld, destructor errors %ld, abandoned %ld\n%s",
                num_allocations.load(), num_violations, long(counters.slots_out), long(counters.tickets_open), long(counters.streams_open),
                long(counters.mapped_bytes), long(counters.device_bytes), long(counters.destructor_errors), long(counters.abandoned_bytes),
                num_violations ? text : "");
    return 0;
}
