/* SPDX-License-Identifier: Apache-2.0
 *
 * Asynchronous copies, barriers in shared memory, and matrix instructions.
 *
 * A copy takes place at some time between its start and the end of a wait for it, in no order with others but what PTX promises; a
 * warpgroup's product when it is waited for. Products are summed in double precision and rounded once.
 */
#include "internal.h"
#include "ptx.h"

#include "kernels/dtype.h"

#include <string.h>

extern "C" thread_local uint8_t shared[];

static uint8_t *shared_at(uint32_t address) { return shared + (int32_t)address; }
static const char *kernel_name(void)
{
    static std::string name;
    name = where_of(current_block->launch->call.kernel);
    return name.c_str();
}

/* ---- barriers in shared memory ------------------------------------------------------------------------------ */

static mbarrier &mbarrier_at(uint32_t address, const void *pc)
{
    auto found = current_block->mbarriers.find(address);
    if (found == current_block->mbarriers.end()) {
        emulator_error(pc, "%s: an mbarrier is used that was not initialized", kernel_name());
        emulator_fatal("no way on");
    }
    return found->second;
}

static void mbarrier_check(mbarrier &m)
{
    if (m.pending < 0)
        emulator_fatal("%s: more arrivals at an mbarrier than it expects", kernel_name());
    if (m.pending || m.bytes)
        return;
    m.phase ^= 1;
    m.pending = m.expected;
    m.complete = gathered(m);
    std::vector<fiber *> waiting;
    waiting.swap(m.waiting);
    for (fiber *t : waiting)
        thread_wake(t);
}

void emulator_mbarrier_init(uint32_t address, int count)
{
    if (address % 8 || count < 1)
        emulator_error(__builtin_return_address(0), "%s: an mbarrier at %#x for %d arrivals", kernel_name(), address, count);
    checker_access(shared_at(address), 8, true, __builtin_return_address(0));
    mbarrier m = {};
    m.expected = m.pending = count;
    current_block->mbarriers[address] = m;
}

/* Arrivals, too, have to come behind the barrier's initialization. */
static void mbarrier_touch(uint32_t address, const void *pc) { checker_access(shared_at(address), 8, false, pc); }

void emulator_mbarrier_arrive(uint32_t address, int count, int64_t bytes)
{
    const void *pc = __builtin_return_address(0);
    mbarrier &m = mbarrier_at(address, pc);
    mbarrier_touch(address, pc);
    fiber *t = self();
    gather(m, t);
    thread_tick(t);
    m.bytes += bytes;
    m.pending -= count;
    mbarrier_check(m);
}

void emulator_mbarrier_expect(uint32_t address, int64_t bytes)
{
    const void *pc = __builtin_return_address(0);
    mbarrier &m = mbarrier_at(address, pc);
    mbarrier_touch(address, pc);
    m.bytes += bytes;
    mbarrier_check(m);
}

void emulator_mbarrier_wait(uint32_t address, uint32_t parity)
{
    const void *pc = __builtin_return_address(0);
    mbarrier *m = &mbarrier_at(address, pc);
    mbarrier_touch(address, pc);
    fiber *t = self();
    while (m->phase == (parity & 1)) {
        m->waiting.push_back(t);
        t->waits_for = address;
        t->parity = parity;
        thread_pause(IN_MBARRIER);
    }
    thread_join(t, m->complete);
}

/* ---- copies ------------------------------------------------------------------------------------------------- */

static void copy_do(struct block *b, const struct copy &c, int actor)
{
    const bool proxy = !actor_generic(b, actor);
    if (c.src)
        checker_async(b, actor, c.number, c.begun, c.src, c.bytes, false, proxy, c.pc);
    checker_async(b, actor, c.number, c.begun, c.dst, c.bytes, true, proxy, c.pc);
    if (c.src)
        memcpy(c.dst, c.src, c.bytes);
    else
        memset(c.dst, 0, c.bytes);
}

/* The oldest thing that a thread's cp.async has to do. */
static void thread_copy_step(fiber *t)
{
    struct block *b = t->block;
    const copy_item item = t->items.front();
    t->items.pop_front();
    if (item.arrival) {
        mbarrier &m = mbarrier_at(item.barrier, item.copy.pc);
        gather_actor(m, actor_of_copies(t), t->done);
        m.pending--;
        mbarrier_check(m);
        return;
    }
    copy_do(b, item.copy, actor_of_copies(t));
    t->done = item.copy.number;
}

static void copying_add(fiber *t, const copy_item &item)
{
    if (t->items.empty())
        t->block->copying.push_back(t);
    t->items.push_back(item);
}

static void copying_tidy(struct block *b)
{
    for (size_t i = 0; i < b->copying.size();)
        if (b->copying[i]->items.empty())
            b->copying[i] = b->copying.back(), b->copying.pop_back();
        else
            i++;
}

void emulator_copy_async(uint32_t dst, const void *src, bool valid)
{
    fiber *t = self();
    if (dst % 16 || (valid && (uintptr_t)src % 16))
        emulator_error(__builtin_return_address(0), "%s: cp.async of 16 bytes to %#x from %p", kernel_name(), dst, src);
    copy_item item = {};
    item.copy = {shared_at(dst), valid ? (const uint8_t *)src : NULL, 16, ++t->copies, t->now, __builtin_return_address(0)};
    copying_add(t, item);
    thread_tick(t);
}

void emulator_copy_async_commit(void)
{
    fiber *t = self();
    t->groups.push_back(t->copies);
}

void emulator_copy_async_wait(int groups)
{
    fiber *t = self();
    uint32_t upto = t->copies;
    if (groups >= 0) {
        if (t->groups.size() <= (size_t)groups)
            return;
        while (t->groups.size() > (size_t)groups) {
            upto = t->groups.front();
            t->groups.pop_front();
        }
    } else {
        t->groups.clear();
    }
    while (t->done < upto)
        thread_copy_step(t);
    copying_tidy(t->block);
    thread_learn_copies(t, upto);
}

void emulator_mbarrier_arrive_copies(uint32_t address)
{
    const void *pc = __builtin_return_address(0);
    mbarrier_at(address, pc);
    mbarrier_touch(address, pc);
    copy_item item = {};
    item.arrival = true;
    item.barrier = address;
    item.copy.pc = pc;
    copying_add(self(), item);
}

static int actor_take(struct block *b)
{
    if (b->free_actors.empty())
        emulator_fatal("%s: more copies under way than there is room for", kernel_name());
    /* Any: those who came back last have been told of the least. */
    const size_t i = random_next() % b->free_actors.size();
    const int actor = b->free_actors[i];
    b->free_actors[i] = b->free_actors.back();
    b->free_actors.pop_back();
    b->actor_number[(size_t)actor]++;
    return actor;
}

void emulator_bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t barrier)
{
    const void *pc = __builtin_return_address(0);
    fiber *t = self();
    struct block *b = t->block;
    mbarrier_at(barrier, pc);
    checker_proxy(shared_at(barrier), 8, pc);
    if (dst % 16 || (uintptr_t)src % 16 || bytes % 16 || !bytes)
        emulator_error(pc, "%s: a bulk copy of %u bytes to %#x from %p", kernel_name(), bytes, dst, src);
    flight f = {};
    f.actor = actor_take(b);
    f.barrier = barrier;
    f.copy = {shared_at(dst), (const uint8_t *)src, bytes, b->actor_number[(size_t)f.actor], t->now, pc};
    b->flights.push_back(f);
    thread_tick(t);
}

static void flight_do(struct block *b, size_t i)
{
    const flight f = b->flights[i];
    b->flights[i] = b->flights.back();
    b->flights.pop_back();
    copy_do(b, f.copy, b->actor_bulk + f.actor);
    mbarrier &m = mbarrier_at(f.barrier, f.copy.pc);
    gather_actor(m, b->actor_bulk + f.actor, f.copy.number);
    b->free_actors.push_back(f.actor);
    m.bytes -= f.copy.bytes;
    mbarrier_check(m);
}

void emulator_fence_proxy(void) { thread_fence(self()); }

void emulator_shared_load(void *to, uint32_t address, uint32_t bytes)
{
    const uint8_t *p = shared_at(address);
    if (address % bytes)
        emulator_error(__builtin_return_address(0), "%s: a load of %u bytes from %#x", kernel_name(), bytes, address);
    checker_access(p, bytes, false, __builtin_return_address(0));
    memcpy(to, p, bytes);
}

void emulator_bar_sync(int id, int threads)
{
    if (id < 0 || id > 15 || threads % WARP || threads > current_block->threads)
        emulator_fatal("%s: bar.sync %d, %d", kernel_name(), id, threads);
    if (id == 0 && threads != current_block->threads)
        emulator_fatal("%s: barrier 0 is __syncthreads'", kernel_name());
    barrier_at(current_block->barrier[id], threads);
}

/* ---- products of a warp ------------------------------------------------------------------------------------- */

struct mma_operands {
    bool bf16;
    float *c;
    const uint32_t *a, *b;
};

/* Elements of 16 bits as floats, by their bits. */
static const float *widened(bool bf16)
{
    static float *tables[2];
    float *&table = tables[bf16];
    if (!table) {
        table = new float[1 << 16];
        for (uint32_t v = 0; v < 1 << 16; v++)
            table[v] = bf16 ? dtype_bf16_to_f32((uint16_t)v) : dtype_fp16_to_f32((uint16_t)v);
    }
    return table;
}

#if defined(__x86_64__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define WIDE
#endif

/* c[16 x n] += a[16 x 16] b[16 x n], rows of b and c `pitch` apart. Products of these types are exact in double precision. */
WIDE static void product_of_16(float *__restrict c, const float (*__restrict a)[16], const float *__restrict b, int n, int pitch)
{
    for (int r = 0; r < 16; r++)
        for (int j0 = 0; j0 < n; j0 += 8) {
            double sum[8] = {};
            for (int k = 0; k < 16; k++)
                for (int j = 0; j < 8; j++)
                    sum[j] += (double)a[r][k] * b[k * pitch + j0 + j];
            for (int j = 0; j < 8; j++)
                c[r * pitch + j0 + j] = (float)(c[r * pitch + j0 + j] + sum[j]);
        }
}

void emulator_mma(bool bf16, float c[4], const uint32_t a[4], const uint32_t b[2])
{
    mma_operands mine = {bf16, c, a, b};
    bool last;
    const uint64_t *all = warp_exchange(OP_MMA, (uint64_t)(uintptr_t)&mine, &last);
    if (!last)
        return;
    float left[16][16], right[16][8], sum[16][8];
    const float *wide = widened(bf16);
    for (int lane = 0; lane < WARP; lane++) {
        const mma_operands *o = (const mma_operands *)(uintptr_t)all[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            left[g + i % 2 * 8][2 * t + i / 2 * 8] = wide[o->a[i] & 0xffff];
            left[g + i % 2 * 8][2 * t + 1 + i / 2 * 8] = wide[o->a[i] >> 16];
            sum[g + i / 2 * 8][2 * t + i % 2] = o->c[i];
        }
        for (int i = 0; i < 2; i++) {
            right[2 * t + i * 8][g] = wide[o->b[i] & 0xffff];
            right[2 * t + 1 + i * 8][g] = wide[o->b[i] >> 16];
        }
    }
    product_of_16(sum[0], left, right[0], 8, 8);
    for (int lane = 0; lane < WARP; lane++) {
        const mma_operands *o = (const mma_operands *)(uintptr_t)all[lane];
        for (int i = 0; i < 4; i++)
            o->c[i] = sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

uint32_t emulator_transpose(uint32_t v)
{
    bool last;
    const uint64_t *all = warp_exchange(OP_TRANSPOSE, v, &last);
    const int lane = (int)(threadIdx.x % WARP), row = lane / 4, column = lane % 4 * 2;
    /* Element (i, j) lies with lane 4 i + j / 2. */
    const uint32_t lo = (uint32_t)all[column * 4 + row / 2] >> row % 2 * 16 & 0xffff;
    const uint32_t hi = (uint32_t)all[(column + 1) * 4 + row / 2] >> row % 2 * 16 & 0xffff;
    return lo | hi << 16;
}

/* ---- products of a warpgroup -------------------------------------------------------------------------------- */

/* Where 8 elements, from column 8 c on, of row r of a tile lie: rows of 128 bytes with their swizzle. */
static const uint8_t *tile_at(uint64_t descriptor, int r, int c)
{
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4, stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    uint32_t at = start + (uint32_t)(r / 8) * stride + (uint32_t)(r % 8) * 128 + (uint32_t)c * 16;
    at ^= (at >> 7 & 7) << 4;
    return shared_at(at);
}

static void wgmma_do(struct block *b, int warp, const wgmma &o)
{
    float left[16][16], right[16][256];
    const float *wide = widened(o.bf16);
    auto row_load = [&](float *to, size_t pitch, uint64_t descriptor, int r) {
        for (int c = 0; c < 2; c++) {
            const uint8_t *p = tile_at(descriptor, r, c);
            const bool defined = checker_loose_read(b, o.begun, p, 16, o.pc);
            uint16_t v[8];
            memcpy(v, p, sizeof v);
            for (int i = 0; i < 8; i++)
                to[(size_t)(8 * c + i) * pitch] = defined ? wide[v[i]] : NAN;
        }
    };
    for (int r = 0; r < 16; r++)
        row_load(left[r], 1, o.a, warp % 4 * 16 + r);
    for (int r = 0; r < o.n; r++)
        row_load(&right[0][r], 256, o.b, r);
    product_of_16(b->products[(size_t)warp].sums[(size_t)o.sums]->at[0], left, right[0], o.n, 256);
}

/* Register i of a lane: where it lies in the warp's 16 rows. */
static float &fragment(wgmma_sums &s, int lane, int i) { return s.at[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]; }

/* Where the sums in these registers are gathered. */
static int sums_take(warp_products &w, int n, const uint64_t *d)
{
    int spare = -1;
    for (int i = 0; i < (int)w.sums.size(); i++)
        if (!w.sums[(size_t)i]->used)
            spare = i;
        else if (w.sums[(size_t)i]->d[0] == (float *)(uintptr_t)d[0] && w.sums[(size_t)i]->n == n)
            return i;
    if (spare < 0) {
        spare = (int)w.sums.size();
        w.sums.push_back(new wgmma_sums);
    }
    wgmma_sums &s = *w.sums[(size_t)spare];
    s.used = true;
    s.n = n;
    for (int lane = 0; lane < WARP; lane++) {
        s.d[lane] = (float *)(uintptr_t)d[lane];
        for (int i = 0; i < n / 2; i++) {
            fragment(s, lane, i) = s.d[lane][i];
            s.d[lane][i] = NAN;
        }
    }
    return spare;
}

/* What the warp knows; what its lanes do from here on is later. */
static moment products_begin(warp_products &w, fiber *const *lanes)
{
    bool same = true;
    for (int i = 0; i < WARP && same; i++) {
        const fiber *t = lanes[i];
        const auto &then = w.then[i];
        same = t->now.base == then.base && t->now.number == then.number && t->now.fenced == then.fenced && t->touched != then.number;
    }
    if (same)
        return w.lately;
    w.lately = moment_of_all(lanes, WARP);
    for (int i = 0; i < WARP; i++) {
        thread_tick(lanes[i]);
        w.then[i] = {lanes[i]->now.base, lanes[i]->now.number, lanes[i]->now.fenced};
    }
    return w.lately;
}

void emulator_wgmma_begin(void)
{
    bool last;
    warp_exchange(OP_WGMMA_BEGIN, 0, &last);
    current_block->products[(size_t)(self()->number / WARP)].fenced = true;
}

void emulator_wgmma(bool bf16, int n, float *d, uint64_t a, uint64_t b)
{
    fiber *t = self();
    struct block *blk = t->block;
    bool last;
    const uint64_t *all = warp_exchange(OP_WGMMA, (uint64_t)(uintptr_t)d, &last);
    if (!last)
        return;
    const void *pc = __builtin_return_address(0);
    if (a >> 62 != 1 || b >> 62 != 1)
        emulator_fatal("%s: descriptors without the 128-byte swizzle", kernel_name());
    warp_products &w = blk->products[(size_t)(t->number / WARP)];
    if (!w.fenced)
        emulator_error(pc, "%s: a product without wgmma_begin after the last wait", kernel_name());
    wgmma o = {};
    o.turn = ++w.begun;
    o.bf16 = bf16;
    o.n = n;
    o.sums = sums_take(w, n, all);
    w.sums[(size_t)o.sums]->last = o.turn;
    o.a = a;
    o.b = b;
    o.begun = products_begin(w, &blk->thread_of[(size_t)(t->number / WARP * WARP)]);
    o.pc = pc;
    w.open.push_back(o);
}

void emulator_wgmma_commit(void)
{
    bool last;
    warp_exchange(OP_WGMMA_COMMIT, 0, &last);
    if (!last)
        return;
    warp_products &w = current_block->products[(size_t)(self()->number / WARP)];
    w.commits.push_back(w.begun);
}

void emulator_wgmma_wait(int groups)
{
    bool last;
    fiber *t = self();
    struct block *b = t->block;
    const int warp = t->number / WARP;
    warp_exchange(OP_WGMMA_WAIT, (uint64_t)groups, &last);
    if (!last)
        return;
    warp_products &w = b->products[(size_t)warp];
    w.fenced = false;
    while (w.commits.size() > (size_t)groups) {
        w.told = w.commits.front();
        w.commits.pop_front();
    }
    for (; !w.open.empty() && w.open.front().turn <= w.told; w.open.pop_front()) {
        /* Copies that are under way may well come first. */
        while (b->async_policy != 2 && async_any(b) && random_next() % 4)
            async_step(b);
        wgmma_do(b, warp, w.open.front());
    }
    for (wgmma_sums *s : w.sums)
        if (s->used && s->last <= w.told) {
            s->used = false;
            for (int lane = 0; lane < WARP; lane++)
                for (int i = 0; i < s->n / 2; i++)
                    s->d[lane][i] = fragment(*s, lane, i);
        }
    thread_learn_products(&b->thread_of[(size_t)(warp * WARP)], b->actor_products + warp, (uint32_t)w.told);
}

void products_drop(struct block *b)
{
    for (warp_products &w : b->products)
        for (wgmma_sums *s : w.sums)
            delete s;
    b->products.clear();
}

/* ---- what is under way -------------------------------------------------------------------------------------- */

bool async_any(struct block *b) { return !b->flights.empty() || !b->copying.empty(); }

void async_step(struct block *b)
{
    size_t i = random_next() % (b->flights.size() + b->copying.size());
    if (i < b->flights.size()) {
        flight_do(b, i);
        return;
    }
    i -= b->flights.size();
    fiber *t = b->copying[i];
    thread_copy_step(t);
    if (t->items.empty())
        b->copying[i] = b->copying.back(), b->copying.pop_back();
}

void block_async_end(struct block *b)
{
    for (warp_products &w : b->products)
        if (!w.open.empty())
            emulator_error(NULL, "%s: a block ends while its products are under way", where_of(b->launch->call.kernel).c_str());
    if (!b->flights.empty())
        emulator_error(NULL, "%s: a block ends while its bulk copies are under way", where_of(b->launch->call.kernel).c_str());
    if (!b->copying.empty())
        emulator_error(NULL, "%s: a block ends while its cp.async are under way", where_of(b->launch->call.kernel).c_str());
}
