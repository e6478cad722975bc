// Runs a translated Metal kernel: one fiber a GPU thread, meetings for what a simdgroup or threadgroup does together.
#include <dlfcn.h>
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "checker.h"
#include "simulator.h"

extern "C" {

struct Buffer {
    void *host;
    uint64_t bytes;
    const char *name;
    uint32_t element_bytes, is_output;
};

enum Order : uint32_t { FORWARD, REVERSE, RANDOM };

struct Launch {
    void (*entry)(void *const *buffers, const ThreadInfo *info);
    const Buffer *buffers;
    uint32_t buffer_count, grid[3], threadgroup[3];  // grid in threads, as in MLX
    uint32_t order, seed, check, matrix_order, skip_groups;
    char *report;  // one finding a line
    uint32_t report_bytes;
    // Counts of the run; traffic only where it was checked: [device, threadgroup][read, write][requests, bytes].
    uint64_t barriers, meetings, matrix_products, threadgroup_bytes, traffic[8];
};

int sim_run(Launch *launch);
void sim_switch(void **save, void *load);
}

#if !defined(__x86_64__)
#error "the fibers' switch is written for x86-64"
#endif
asm(R"(
.text
.globl sim_switch
.type sim_switch,@function
sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sim_switch,.-sim_switch
)");

namespace sim {
namespace {

constexpr uint32_t NOBODY = ~0u;
constexpr uint32_t MOST_THREADS = 1024, MOST_THREADGROUP_BYTES = 32768;  // what Metal allows
constexpr size_t PAGE = 4096, GUARD = 16 << 20, STACK = 128 << 10, FENCE = 256, ARENA = 1 << 18;
constexpr size_t MOST_FINDINGS = 12;
constexpr size_t MOST_COPIED = 128 << 20;  // larger inputs stay where they are, without guards: for mode fast alone
constexpr unsigned char POISON = 0xFF;  // NaN in every float type

enum class State : uint8_t { READY, AT_BARRIER, AT_MEETING, DONE };

struct Thread {
    void *stack_pointer;
    char *stack;
    State state;
    bool all_lanes;
    uint32_t line, flags;
    const char *what;
    Meeting meeting;
    void *argument;
    ThreadInfo info;
};

struct Array {  // of threadgroup memory
    uint32_t site, group;
    size_t offset, bytes;
    const char *name;
};

struct Device {  // a buffer's copy, between inaccessible pages
    char *mapping, *data;
    size_t mapped;
};

struct Known {  // said once for each pair of places in the text
    const char *kind;
    uintptr_t pc, other_pc;
};

struct Machine {
    Launch *launch = nullptr;
    std::vector<Thread> threads;
    char *stacks = nullptr;
    void *main_stack = nullptr;
    uint32_t count = 0, running = NOBODY, done = 0, ready = 0, ready_in[32] = {}, groups[3] = {};
    std::vector<uint16_t> turn;  // threads in the order in which they get to run
    std::vector<uint16_t> place;
    uint64_t ready_bits[MOST_THREADS / 64] = {};
    uint64_t random = 0;
    sigjmp_buf failed;
    char *arena = nullptr;
    size_t arena_used = 0, group_bytes = 0;
    std::vector<Array> arrays;
    std::vector<Device> devices;
    std::vector<void *> pointers;
    uintptr_t module = 0, module_end = 0;
    Epochs now = {};
    Checker checker;
    std::vector<std::string> findings;
    std::vector<Known> known;
};
Machine *m = nullptr;

__attribute__((format(printf, 1, 2))) std::string text(const char *format, ...) {
    char buffer[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

std::string where(uint32_t thread) {
    if (thread == NOBODY) return "";
    const uint32_t *group = m->threads[thread].info.threadgroup_position_in_grid;
    return text(" (threadgroup %u,%u,%u thread %u)", group[0], group[1], group[2], thread);
}

std::string at(uintptr_t pc) { return text("[pc %lx]", (unsigned long)(pc - m->module)); }

void report(const std::string &finding) {
    if (m->findings.size() < MOST_FINDINGS) m->findings.push_back(finding);
}

[[noreturn]] void die(const std::string &finding) {
    report(finding);
    siglongjmp(m->failed, 1);
}

// ---- Scheduling ----

uint32_t draw(uint32_t below) {
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return uint32_t((m->random >> 32) * below >> 32);
}

// A new order at each barrier, so that a thread runs ahead where a barrier is missing.
void draw_turns() {
    for (uint32_t i = 0; i < m->count; ++i) m->turn[i] = i;
    if (m->launch->order == REVERSE) std::reverse(m->turn.begin(), m->turn.begin() + m->count);
    if (m->launch->order == RANDOM) {
        bool whole_simdgroups = draw(2) && m->count % 32 == 0;
        uint32_t unit = whole_simdgroups ? 32 : 1;
        for (uint32_t i = m->count / unit; i > 1; --i) {
            uint16_t *a = &m->turn[(i - 1) * unit], *b = &m->turn[draw(i) * unit];
            if (a != b) std::swap_ranges(a, a + unit, b);
        }
    }
    for (uint32_t i = 0; i < m->count; ++i) m->place[m->turn[i]] = i;
}

void make_ready(uint32_t thread) {
    uint32_t place = m->place[thread];
    m->threads[thread].state = State::READY;
    m->ready_bits[place / 64] |= 1ull << place % 64;
    ++m->ready;
    ++m->ready_in[thread / 32];
}

uint32_t next_ready() {
    for (uint32_t word = 0; word * 64 < m->count; ++word) {
        if (!m->ready_bits[word]) continue;
        uint32_t place = word * 64 + __builtin_ctzll(m->ready_bits[word]);
        m->ready_bits[word] &= m->ready_bits[word] - 1;
        --m->ready;
        return m->turn[place];
    }
    return NOBODY;
}

// No thread of the simdgroup can run: those that wait at the first one's place meet there.
void meet_in_simdgroup(uint32_t simdgroup) {
    uint32_t low = simdgroup * 32, high = std::min(m->count, low + 32), first = NOBODY, present = 0, all = 0;
    for (uint32_t i = low; i < high && first == NOBODY; ++i)
        if (m->threads[i].state == State::AT_MEETING) first = i;
    if (first == NOBODY) return;
    Thread &leader = m->threads[first];
    void *arguments[32] = {};
    for (uint32_t i = low; i < high; ++i) {
        Thread &thread = m->threads[i];
        all |= 1u << (i - low);
        if (thread.state != State::AT_MEETING) continue;
        if (thread.line != leader.line || strcmp(thread.what, leader.what))
            die(text("simdgroup diverges: %s at line %u, but %s at line %u", leader.what, leader.line, thread.what,
                     thread.line) + where(i));
        present |= 1u << (i - low);
        arguments[i - low] = thread.argument;
    }
    if (leader.all_lanes && (present != all || all != ~0u))
        die(text("%s at line %u reached by %d of 32 lanes", leader.what, leader.line, __builtin_popcount(present)) +
            where(first));
    ++m->launch->meetings;
    if (leader.meeting) {
        m->running = first;
        leader.meeting(arguments, present);
    }
    m->now.pass_simdgroup_barrier(leader.flags, simdgroup);
    for (uint32_t i = low; i < high; ++i)
        if (present >> (i - low) & 1) make_ready(i);
}

// Nothing can run: the threadgroup is at a barrier, all of it or there is a bug.
void meet_in_threadgroup() {
    uint32_t first = NOBODY, waiting = 0;
    for (uint32_t i = 0; i < m->count; ++i) {
        if (m->threads[i].state != State::AT_BARRIER) continue;
        if (first == NOBODY) first = i;
        if (m->threads[i].line != m->threads[first].line)
            die(text("threadgroup diverges: barriers at lines %u and %u", m->threads[first].line, m->threads[i].line) +
                where(i));
        ++waiting;
    }
    if (first == NOBODY) return;
    if (waiting != m->count)
        die(text("threadgroup_barrier at line %u reached by %u of %u threads", m->threads[first].line, waiting, m->count) +
            where(first));
    ++m->launch->barriers;
    m->now.pass_barrier(m->threads[first].flags);
    draw_turns();
    for (uint32_t i = 0; i < m->count; ++i) make_ready(i);
}

void leave(uint32_t me) {
    if (--m->ready_in[me / 32] == 0) meet_in_simdgroup(me / 32);
    if (!m->ready && m->done < m->count) meet_in_threadgroup();
    uint32_t next = next_ready();
    if (next == NOBODY) {
        if (m->done < m->count) die("threads wait for each other" + where(me));
        m->running = NOBODY;
        sim_switch(&m->threads[me].stack_pointer, m->main_stack);
        return;
    }
    m->running = next;
    if (next != me) sim_switch(&m->threads[me].stack_pointer, m->threads[next].stack_pointer);
}

[[gnu::noinline]] void fiber() {
    for (;;) {  // once for each threadgroup
        uint32_t me = m->running;
        m->launch->entry(m->pointers.data(), &m->threads[me].info);
        m->threads[me].state = State::DONE;
        ++m->done;
        leave(me);
    }
}

void make_fibers(uint32_t count) {
    m->stacks = (char *)mmap(nullptr, (STACK + PAGE) * count, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m->threads.resize(count);
    m->turn.resize(count);
    m->place.resize(count);
    for (uint32_t i = 0; i < count; ++i) {
        Thread &thread = m->threads[i];
        mprotect(m->stacks + (STACK + PAGE) * i, PAGE, PROT_NONE);
        thread.stack = m->stacks + (STACK + PAGE) * i + PAGE;
        void **top = (void **)(thread.stack + STACK);
        *--top = nullptr;  // an odd number of words below a 16-byte boundary, as after a call
        *--top = (void *)fiber;
        for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
        thread.stack_pointer = top;
    }
}

// Small writes outside threadgroup arrays, found without the checker too.
void check_fences() {
    for (const Array &array : m->arrays) {
        if (array.group != m->now.group) continue;
        const unsigned char *low = (unsigned char *)m->arena + array.offset - FENCE;
        const unsigned char *high = (unsigned char *)m->arena + array.offset + array.bytes;
        for (size_t i = 0; i < FENCE; ++i)
            if (low[i] != POISON || high[i] != POISON)
                die(text("out of bounds: threadgroup '%s' was written outside its %zu bytes", array.name, array.bytes));
    }
}

void run_threadgroup(uint32_t index) {
    const Launch &launch = *m->launch;
    uint32_t group[3] = {index % m->groups[0], index / m->groups[0] % m->groups[1], index / m->groups[0] / m->groups[1]};
    uint32_t size[3];
    for (int d = 0; d < 3; ++d) size[d] = std::min(launch.threadgroup[d], launch.grid[d] - group[d] * launch.threadgroup[d]);
    m->count = size[0] * size[1] * size[2];
    m->done = m->ready = 0;
    m->now = {index + 1, {1, 1}, {}};
    m->group_bytes = 0;
    draw_turns();
    for (uint32_t i = 0; i < m->count; ++i) {
        ThreadInfo &info = m->threads[i].info;
        uint32_t position[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
        for (int d = 0; d < 3; ++d) {
            info.thread_position_in_grid[d] = group[d] * launch.threadgroup[d] + position[d];
            info.thread_position_in_threadgroup[d] = position[d];
            info.threadgroup_position_in_grid[d] = group[d];
            info.threads_per_grid[d] = launch.grid[d];
        }
        info.thread_index_in_threadgroup = i;
        info.thread_index_in_simdgroup = i % 32;
        info.simdgroup_index_in_threadgroup = i / 32;
        make_ready(i);
    }
    m->running = next_ready();
    sim_switch(&m->main_stack, m->threads[m->running].stack_pointer);
    check_fences();
}

// ---- Memory ----

void make_buffers() {
    const Launch &launch = *m->launch;
    for (uint32_t i = 0; i < launch.buffer_count; ++i) {
        const Buffer &buffer = launch.buffers[i];
        if (buffer.bytes > MOST_COPIED && !buffer.is_output) {
            m->devices.push_back({nullptr, (char *)buffer.host, 0});
            m->pointers.push_back(buffer.host);
            continue;
        }
        size_t padded = (buffer.bytes + 15) & ~15ull, pages = (padded + PAGE - 1) & ~(PAGE - 1);
        Device device;
        device.mapped = pages + 2 * GUARD;
        device.mapping = (char *)mmap(nullptr, device.mapped, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        char *first = device.mapping + GUARD;
        mprotect(first, pages, PROT_READ | PROT_WRITE);
        device.data = first + pages - padded;
        if (buffer.is_output) memset(device.data, POISON, buffer.bytes);
        else memcpy(device.data, buffer.host, buffer.bytes);
        if (!buffer.is_output) mprotect(first, pages, PROT_READ);
        m->devices.push_back(device);
        m->pointers.push_back(device.data);
        if (!launch.check) continue;
        uintptr_t low = (uintptr_t)device.data;
        std::vector<Cell> cells(buffer.is_output ? buffer.bytes : 0);
        m->checker.regions.push_back({low, low + buffer.bytes, buffer.name, buffer.element_bytes, DEVICE,
                                      bool(buffer.is_output), !buffer.is_output, std::move(cells)});
    }
}

void take_outputs(bool complete) {
    const Launch &launch = *m->launch;
    for (uint32_t i = 0; i < launch.buffer_count; ++i) {
        const Buffer &buffer = launch.buffers[i];
        if (!buffer.is_output) continue;
        memcpy(buffer.host, m->devices[i].data, buffer.bytes);
        if (!launch.check || !complete) continue;
        const std::vector<Cell> &cells = m->checker.regions[i].cells;
        auto missing = std::find_if(cells.begin(), cells.end(), [](const Cell &cell) { return !cell.write_group; });
        if (missing != cells.end())
            report(text("output '%s' is never written at [%ld]", buffer.name,
                        (long)(missing - cells.begin()) / buffer.element_bytes));
    }
}

void on_access(uintptr_t address, uint32_t bytes, bool write, uintptr_t pc) {
    if (!m || m->running == NOBODY) return;
    uint32_t me = m->running;
    if (address - (uintptr_t)m->threads[me].stack < STACK) return;
    uintptr_t infos = (uintptr_t)m->threads.data(), pointers = (uintptr_t)m->pointers.data();
    if (!write && address - m->module < m->module_end - m->module) return;  // the kernel's own constants
    if (address - infos < m->threads.size() * sizeof(Thread) || address - pointers < m->pointers.size() * sizeof(void *))
        return;
    Finding found = m->checker.access(address, bytes, write, me, uint32_t(pc - m->module), m->now);
    if (!found.kind) return;
    for (const Known &known : m->known)
        if (known.kind == found.kind && known.pc == pc && known.other_pc == found.other_pc && !found.fatal) return;
    m->known.push_back({found.kind, pc, found.other_pc});
    std::string sentence = text("%s: %u-byte %s", found.kind, bytes, write ? "write" : "read");
    if (found.region)
        sentence += text(" of '%s'[%ld]", found.region->name,
                         ((long)address - (long)found.region->low) / (long)found.region->element_bytes);
    sentence += " " + at(pc);
    if (found.other_pc) {
        sentence += " against " + at(m->module + found.other_pc);
        if (found.other_group != m->now.group) sentence += " in another threadgroup";
        else if (found.other_thread != SEVERAL) sentence += text(" by thread %u", found.other_thread);
    }
    sentence += where(me);
    if (found.fatal) die(sentence);
    report(sentence);
}

void on_misaligned(uint32_t bytes, uintptr_t pc) {
    if (m && m->running != NOBODY) report(text("misaligned %u-byte access ", bytes) + at(pc) + where(m->running));
}

// ---- Faults ----

const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
struct sigaction before[4];

void on_signal(int signal, siginfo_t *info, void *context) {
    if (!m || m->running == NOBODY) {
        for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
        return;
    }
    uintptr_t address = (uintptr_t)info->si_addr;
    std::string place = " " + at(((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP]) + where(m->running);
    if (signal == SIGILL) die("undefined behaviour" + place);
    if (signal == SIGFPE) die("integer division by zero" + place);
    for (uint32_t i = 0; i < m->launch->buffer_count; ++i) {
        uintptr_t low = (uintptr_t)m->devices[i].mapping;
        if (address - low < m->devices[i].mapped)
            die(text("out of bounds: '%s' at byte %ld of %lu", m->launch->buffers[i].name,
                     (long)(address - (uintptr_t)m->devices[i].data), (unsigned long)m->launch->buffers[i].bytes) + place);
    }
    die("out of bounds: an address in no buffer" + place);
}

// The end of the library that `module` begins.
int find_end(dl_phdr_info *library, size_t, void *) {
    if (library->dlpi_addr != m->module) return 0;
    for (int i = 0; i < library->dlpi_phnum; ++i)
        if (library->dlpi_phdr[i].p_type == PT_LOAD)
            m->module_end = m->module + library->dlpi_phdr[i].p_vaddr + library->dlpi_phdr[i].p_memsz;
    return 1;
}

void run_all() {
    std::vector<uint32_t> order;
    for (uint32_t i = m->launch->skip_groups; i < m->groups[0] * m->groups[1] * m->groups[2]; ++i) order.push_back(i);
    if (m->launch->order == REVERSE) std::reverse(order.begin(), order.end());
    if (m->launch->order == RANDOM)
        for (uint32_t i = uint32_t(order.size()); i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
    bool complete = false;
    if (!sigsetjmp(m->failed, 1)) {
        for (uint32_t index : order) run_threadgroup(index);
        complete = true;
    }
    m->running = NOBODY;
    take_outputs(complete);
}

}  // namespace
}  // namespace sim

using namespace sim;

extern "C" {

uint32_t sim_lane() { return m->running & 31; }
int sim_matrix_order() { return int(m->launch->matrix_order); }
void sim_count_matrix_product() { ++m->launch->matrix_products; }
void sim_fail(const char *sentence, uint32_t line) { die(text("%s, line %u", sentence, line) + where(m->running)); }

// clang calls it for each rounding to bfloat16.
__bf16 __truncsfbf2(float value) {
    uint32_t bits = __builtin_bit_cast(uint32_t, value);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    uint16_t rounded = nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return __builtin_bit_cast(__bf16, rounded);
}

void sim_threadgroup_barrier(uint32_t flags, uint32_t line) {
    Thread &thread = m->threads[m->running];
    thread.state = State::AT_BARRIER;
    thread.flags = flags;
    thread.line = line;
    leave(m->running);
}

void sim_simdgroup_barrier(uint32_t flags, uint32_t line) {
    m->threads[m->running].flags = flags;
    sim_meet(nullptr, nullptr, "simdgroup_barrier", line, true);
    m->threads[m->running].flags = 0;
}

void sim_meet(Meeting meeting, void *argument, const char *what, uint32_t line, bool all_lanes) {
    Thread &thread = m->threads[m->running];
    thread.state = State::AT_MEETING;
    thread.meeting = meeting;
    thread.argument = argument;
    thread.what = what;
    thread.line = line;
    thread.all_lanes = all_lanes;
    if (strcmp(what, "simdgroup_barrier")) thread.flags = 0;
    leave(m->running);
}

void *sim_threadgroup_memory(uint32_t site, size_t bytes, size_t element_bytes, const char *name) {
    Array *array = nullptr;
    for (Array &known : m->arrays)
        if (known.site == site) array = &known;
    if (!array) {
        size_t offset = (m->arena_used + FENCE + 255) & ~255ull;
        m->arena_used = offset + bytes + FENCE;
        if (m->arena_used > ARENA) die("threadgroup memory passes what Metal allows by far");
        m->arrays.push_back({site, 0, offset, bytes, name});
        array = &m->arrays.back();
        uintptr_t low = (uintptr_t)m->arena + offset;
        if (m->launch->check)
            m->checker.regions.push_back({low, low + bytes, name, uint32_t(element_bytes), THREADGROUP, true, false,
                                          std::vector<Cell>(bytes)});
    }
    if (array->group != m->now.group) {
        array->group = m->now.group;
        m->group_bytes += (bytes + 15) & ~15ull;
        m->launch->threadgroup_bytes = std::max<uint64_t>(m->launch->threadgroup_bytes, m->group_bytes);
        memset(m->arena + array->offset - FENCE, POISON, bytes + 2 * FENCE);
        if (m->group_bytes > MOST_THREADGROUP_BYTES)
            die(text("%zu bytes of threadgroup memory; Metal allows %u", m->group_bytes, MOST_THREADGROUP_BYTES));
    }
    return m->arena + array->offset;
}

// clang's -fsanitize=thread calls these before each access to memory that several threads may see.
#define PC ((uintptr_t)__builtin_return_address(0) - 1)
#define ACCESS(n) \
    void __tsan_read##n(void *p) { \
        if ((uintptr_t)p % n) on_misaligned(n, PC); \
        on_access((uintptr_t)p, n, false, PC); \
    } \
    void __tsan_write##n(void *p) { \
        if ((uintptr_t)p % n) on_misaligned(n, PC); \
        on_access((uintptr_t)p, n, true, PC); \
    } \
    void __tsan_unaligned_read##n(void *p) { on_access((uintptr_t)p, n, false, PC); } \
    void __tsan_unaligned_write##n(void *p) { on_access((uintptr_t)p, n, true, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_init() {}
void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    on_access((uintptr_t)from, bytes, false, PC);
    on_access((uintptr_t)to, bytes, true, PC);
    return memcpy(to, from, bytes);
}
void *__tsan_memset(void *to, int value, size_t bytes) {
    on_access((uintptr_t)to, bytes, true, PC);
    return memset(to, value, bytes);
}

// Returns the number of findings, which `report` holds.
int sim_run(Launch *launch) {
    Machine machine;
    m = &machine;
    m->launch = launch;
    m->random = (launch->seed + 1) * 0x9E3779B97F4A7C15ull | 1;
    Dl_info module;
    dladdr((void *)launch->entry, &module);
    m->module = (uintptr_t)module.dli_fbase;
    dl_iterate_phdr(find_end, m);
    uint32_t threads = 1;
    for (int d = 0; d < 3; ++d) {
        launch->threadgroup[d] = std::min(launch->threadgroup[d], launch->grid[d]);
        if (!launch->threadgroup[d]) return snprintf(launch->report, launch->report_bytes, "an empty grid\n") > 0;
        threads *= launch->threadgroup[d];
        m->groups[d] = (launch->grid[d] + launch->threadgroup[d] - 1) / launch->threadgroup[d];
    }
    if (threads > MOST_THREADS) return snprintf(launch->report, launch->report_bytes, "over 1024 threads\n") > 0;
    m->checker.regions.reserve(64);  // pointers to them stay
    m->arena = (char *)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    make_fibers(threads);
    make_buffers();
    static char signal_stack[1 << 16];
    stack_t ours = {}, theirs = {};
    ours.ss_sp = signal_stack;
    ours.ss_size = sizeof signal_stack;
    sigaltstack(&ours, &theirs);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &before[i]);
    run_all();
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&theirs, nullptr);
    for (const Device &device : m->devices)
        if (device.mapped) munmap(device.mapping, device.mapped);
    munmap(m->stacks, (STACK + PAGE) * threads);
    munmap(m->arena, ARENA);
    for (int space = 0; space < 2; ++space)
        for (int write = 0; write < 2; ++write) {
            launch->traffic[space * 4 + write * 2] = m->checker.traffic[space][write].requests;
            launch->traffic[space * 4 + write * 2 + 1] = m->checker.traffic[space][write].bytes;
        }
    std::string report;
    for (const std::string &finding : m->findings) report += finding + "\n";
    snprintf(launch->report, launch->report_bytes, "%s", report.c_str());
    int findings = int(m->findings.size());
    m = nullptr;
    return findings;
}
}
