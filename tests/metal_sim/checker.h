// Shadow of device and threadgroup memory: races, exact bounds, uninitialised reads, and counts of what is asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sim {

enum Space { DEVICE = 0, THREADGROUP = 1 };
constexpr uint32_t BARRIER_FLAG[2] = {1, 2};  // mem_flags::mem_device, mem_threadgroup
constexpr uint32_t SEVERAL = 0xFFFF;

// Who wrote a byte last, and who has read it since; group 0 is nobody.
struct Cell {
    uint32_t write_group, write_epoch, write_simd_epoch, write_pc;
    uint32_t read_group, read_epoch, read_simd_epoch, read_pc, read_simdgroups;
    uint16_t write_thread, read_thread;
};

struct Region {
    uintptr_t low, high;
    const char *name;
    uint32_t element_bytes;
    Space space;
    bool writable, initialised;
    std::vector<Cell> cells;  // none for an input
};

struct Traffic {
    uint64_t requests, bytes;
};

// Where a thread stands: epochs count the barriers passed, by space, and in each simdgroup.
struct Epochs {
    uint32_t group, of_group[2], of_simdgroup[2][32];

    void pass_barrier(uint32_t flags) {
        for (int space : {DEVICE, THREADGROUP})
            if (flags & BARRIER_FLAG[space]) ++of_group[space];
    }
    void pass_simdgroup_barrier(uint32_t flags, uint32_t simdgroup) {
        for (int space : {DEVICE, THREADGROUP})
            if (flags & BARRIER_FLAG[space]) ++of_simdgroup[space][simdgroup];
    }
};

struct Finding {
    const char *kind = nullptr;  // none: the access is right
    bool fatal = false;
    const Region *region = nullptr;
    uint32_t other_pc = 0, other_thread = SEVERAL, other_group = 0;
};

class Checker {
  public:
    std::vector<Region> regions;
    Traffic traffic[2][2] = {};  // [space][write]

    Region *find(uintptr_t address) {
        if (last_ < regions.size() && inside(regions[last_], address)) return &regions[last_];
        for (size_t i = 0; i < regions.size(); ++i)
            if (inside(regions[i], address)) return &regions[last_ = i];
        return nullptr;
    }

    const Region *nearest(uintptr_t address) const {
        const Region *best = nullptr;
        uintptr_t least = UINTPTR_MAX;
        for (const Region &region : regions) {
            uintptr_t distance = address < region.low ? region.low - address : address - region.high;
            if (distance < least) least = distance, best = &region;
        }
        return best;
    }

    Finding access(uintptr_t address, uint32_t bytes, bool write, uint32_t thread, uint32_t pc, const Epochs &now) {
        Region *region = find(address);
        if (!region || address + bytes > region->high)
            return {"out of bounds", true, region ? region : nearest(address)};
        if (write && !region->writable) return {"write to an input", true, region};
        Traffic &asked = traffic[region->space][write];
        ++asked.requests;
        asked.bytes += bytes;
        Finding first;
        if (region->cells.empty()) return first;
        Cell *cell = &region->cells[address - region->low];
        for (uint32_t i = 0; i < bytes; ++i, ++cell) {
            Finding found = write ? on_write(*cell, *region, thread, pc, now) : on_read(*cell, *region, thread, pc, now);
            if (found.kind && !first.kind) first = found;
        }
        return first;
    }

  private:
    size_t last_ = 0;

    static bool inside(const Region &region, uintptr_t address) {
        return address >= region.low && address < region.high;
    }

    // Threadgroup memory belongs to one threadgroup; device memory of another one is never ordered with ours.
    static bool known(const Region &region, uint32_t group, const Epochs &now) {
        return group && (region.space == DEVICE || group == now.group);
    }

    static bool races_with_write(const Cell &cell, const Region &region, uint32_t thread, const Epochs &now) {
        if (cell.write_group != now.group) return true;
        if (cell.write_thread == thread || cell.write_epoch != now.of_group[region.space]) return false;
        uint32_t simdgroup = thread / 32;
        return cell.write_thread / 32 != simdgroup || cell.write_simd_epoch == now.of_simdgroup[region.space][simdgroup];
    }

    static bool races_with_reads(const Cell &cell, const Region &region, uint32_t thread, const Epochs &now) {
        if (cell.read_group != now.group) return true;
        if (cell.read_epoch != now.of_group[region.space] || cell.read_thread == thread) return false;
        uint32_t simdgroup = thread / 32;
        return cell.read_simdgroups != 1u << simdgroup ||
               cell.read_simd_epoch == now.of_simdgroup[region.space][simdgroup];
    }

    Finding on_read(Cell &cell, const Region &region, uint32_t thread, uint32_t pc, const Epochs &now) {
        Finding found;
        bool written = known(region, cell.write_group, now);
        if (!written && !region.initialised) found = {"read of uninitialised memory", false, &region};
        if (written && races_with_write(cell, region, thread, now))
            found = {"data race", false, &region, cell.write_pc, cell.write_thread, cell.write_group};
        uint32_t epoch = now.of_group[region.space], simdgroup = thread / 32;
        if (cell.read_group == now.group && cell.read_epoch == epoch) {
            if (cell.read_thread != thread) cell.read_thread = SEVERAL;
            cell.read_simdgroups |= 1u << simdgroup;
        } else {
            cell.read_group = now.group, cell.read_epoch = epoch, cell.read_thread = thread;
            cell.read_simdgroups = 1u << simdgroup;
        }
        cell.read_simd_epoch = now.of_simdgroup[region.space][simdgroup];
        cell.read_pc = pc;
        return found;
    }

    Finding on_write(Cell &cell, const Region &region, uint32_t thread, uint32_t pc, const Epochs &now) {
        Finding found;
        if (known(region, cell.write_group, now) && races_with_write(cell, region, thread, now))
            found = {"data race", false, &region, cell.write_pc, cell.write_thread, cell.write_group};
        else if (known(region, cell.read_group, now) && races_with_reads(cell, region, thread, now))
            found = {"data race", false, &region, cell.read_pc, cell.read_thread, cell.read_group};
        cell.write_group = now.group, cell.write_epoch = now.of_group[region.space], cell.write_thread = thread;
        cell.write_simd_epoch = now.of_simdgroup[region.space][thread / 32];
        cell.write_pc = pc;
        return found;
    }
};

}  // namespace sim
