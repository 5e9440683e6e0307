// A chain of products of batches of matrices on Hopper, as one launch.
//
// Product p of a chain is out = scale * (alpha * L R + beta * first + gamma * second + diagonal * I), for each matrix of a
// batch. Where it is symmetric, tiles on and below the diagonal are computed; those below are stored as their mirror image too.
// Tasks (a tile of a product of a matrix) are ordered by team of matrices, product, matrix, tile, and a block takes the next one
// whenever it has room for it. A product of a matrix begins when all tiles of the matrix's earlier products are in memory: one
// counter per matrix. A task waits for earlier ones only, which blocks that are running have taken: so the chain cannot stand
// still, however many of its blocks find a place beside other kernels. Teams are as small as the cache wants them and as large
// as it takes for nobody to wait.
//
// A block has two groups of warps that multiply, by turns: while one finishes a tile, the tensor cores work for the other. Four
// single threads help them: one takes tasks and waits for earlier products, one loads operands, and one for each group loads
// the addend into the staging and stores what becomes of it. A second addend comes through the stages of operands, as the last.
//
//   full, empty   of a stage of operands: loaded, read
//   order         of a group: its turn to multiply
//   open          of a turn, modulo TURNS: it is known which task it has, and what that reads is in memory
//   begun         the turn that has opened last: its operands come next, and the task of another turn may be taken
//   ready         of a group's staging: the addend is there, or nothing is any more
//   staged        of a group's upper and lower half of a tile: written to the staging
//   mirrored      of a group: the upper half's mirror image was read by the stores, the lower one's may be written
//
// What a task is lies in shared memory for TURNS turns, which must be more than it takes until all have read it: eight. Tasks are
// taken a turn before their operands are loaded; who multiplies may be four turns behind that, one for each stage; who stores, two
// behind who multiplies; and at the end two turns open at once.
typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef FP16
#define FP16 1
#endif
constexpr int TILE = 128, DEPTH = 64, BOX = 64;
constexpr int BOX_BYTES = BOX * BOX * 2, OPERAND = 2 * BOX_BYTES, STAGE = 2 * OPERAND, STAGES = 4;
constexpr int TILE_BYTES = 4 * BOX_BYTES, HALF_BYTES = 2 * BOX_BYTES, STAGING = TILE_BYTES + HALF_BYTES;
constexpr int TURNS = 16, GROUP = 128, THREADS = 3 * GROUP;
constexpr int MAPS = 8, PRODUCTS = 20;
constexpr u32 WARPS = GROUP / 32;

enum Kind : int { WIDE, TALL, PLAIN };  // X X^T, X^T X, and L R

struct alignas(64) Map { char bytes[128]; };
struct Product {
    int left, right, out, first, second;  // maps; addends -1 for none
    int kind, steps;                      // of DEPTH
    int part;                             // matrices from this one on lie in the map after `left`; of X only
    float alpha, beta, gamma, diagonal;
    const u32* tiles;                     // row * 65536 + col
    const float* scales;                  // by matrix, or none
    int num_tiles, tiles_before;          // of a matrix: of this product, and of all before it in the chain
    int is_symmetric, is_bf16;            // what is stored is bf16, whatever operands are
};
struct Chain {
    Map maps[MAPS];
    Product products[PRODUCTS];
    int* counters;  // by matrix: tiles that are in memory, of this chain and of those before it
    u32* next;      // the number of the task that is taken next
    u32 first_number;
    int num_products, batch, teams, tiles_of_matrix, tiles_done;
};

__device__ __forceinline__ int stages_of(const Product& product) { return product.steps + (product.second >= 0); }
__device__ __forceinline__ u32 address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void init_barrier(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void expect(u32 bar, u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(nbytes) : "memory");
}
__device__ __forceinline__ bool is_over(u32 bar, u32 parity) {
    u32 found;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(found)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return found;
}
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
    while (!is_over(bar, parity)) {}
}
__device__ __forceinline__ void load(u32 into, const Map& map, int x, int y, int z, u32 bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(into),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(bar)
                 : "memory");
}
// A tile, as four boxes by rows.
__device__ __forceinline__ void load_tile(u32 into, const Map& map, int row, int col, int batch, u32 bar) {
    for (int n = 0; n < 4; ++n) load(into + BOX_BYTES * n, map, col + n % 2 * BOX, row + n / 2 * BOX, batch, bar);
}
__device__ __forceinline__ void store(const Map& map, int x, int y, int z, u32 from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(x), "r"(y), "r"(z),
                 "r"(from)
                 : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Between what loads and stores by maps do in memory and what counters say of it. With no state space it would be a GPU-wide
// barrier of its own.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_staging() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ int count_of(const int* counter) {
    int found;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    return found;
}
__device__ __forceinline__ void count_one(int* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }

struct alignas(16) Task {
    int product, batch, row, col;  // no product: there are no more tasks
};
__device__ __forceinline__ Task task_at(const Chain& chain, u32 number) {
    const u32 batch = chain.batch, teams = chain.teams;
    const u32 team = ((number / chain.tiles_of_matrix + 1) * teams - 1) / batch;
    const u32 members = batch * (team + 1) / teams - batch * team / teams;
    const u32 first = batch * team / teams;
    u32 inside = number - first * chain.tiles_of_matrix;
    int product = 0;
    while (product + 1 < chain.num_products && inside >= members * chain.products[product + 1].tiles_before) ++product;
    inside -= members * chain.products[product].tiles_before;
    const u32 num_tiles = chain.products[product].num_tiles;
    const u32 place = __ldg(chain.products[product].tiles + inside % num_tiles);
    // The last matrix first: what comes into a chain was written from the first matrix on, and what was written last is in the cache.
    return {product, (int)(batch - 1 - first - inside / num_tiles), (int)(place >> 16) * TILE, (int)(place & 65535) * TILE};
}
__device__ __forceinline__ void tell(u32 at, const Task& task) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(task.product), "r"(task.batch), "r"(task.row), "r"(task.col)
                 : "memory");
}
__device__ __forceinline__ Task told(u32 at) {
    Task task;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(task.product), "=r"(task.batch), "=r"(task.row), "=r"(task.col)
                 : "r"(at)
                 : "memory");
    return task;
}

// Operands.

// Rows of 128 bytes in groups of eight, swizzled; where an operand lies by columns, its blocks of 64 columns are a box apart.
// The low word, to which sixteenths of bytes are added.
__device__ __forceinline__ u32 described(u32 at) { return (at >> 4) | (BOX_BYTES >> 4) << 16; }
__device__ __forceinline__ u64 descriptor(u32 low) { return (u64)low | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }
#if FP16
#define OPERANDS "f16.f16"
#else
#define OPERANDS "bf16.bf16"
#endif
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
template <int LEFT_T, int RIGHT_ROWS>
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, "
        "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, %67, %68;\n}\n"
        : F16(0), F16(16), F16(32), F16(48)
        : "l"(a), "l"(b), "r"(keep), "n"(LEFT_T), "n"(RIGHT_ROWS));
}
__device__ __forceinline__ void fence(float (&d)[64]) { asm volatile("" : F16(0), F16(16), F16(32), F16(48)::"memory"); }

// Where a thread is in the ring of stages.
struct Ring {
    u32 stage, phase;
    __device__ __forceinline__ void advance(u32 by) { stage += by, phase ^= (stage / STAGES) & 1, stage %= STAGES; }
};

// All of a tile's depth. `next` is the barrier of the other group's turn, which comes when the last step was issued, and when the
// addend that comes behind it is there: nobody else waits for that stage, and who came to it a lap later would take the lap before
// for its own.
template <int LEFT_T, int RIGHT_ROWS>
__device__ __forceinline__ void multiply_all(float (&acc)[2][64], Ring& ring, int steps, u32 base, u32 right_at, u32 full, u32 empty, bool has_second, u32 next, int lane) {
    const u32 first = described(base), right = right_at >> 4;
    u32 before = 0;
    int k = 0;
    do {  // at least once: else the accumulators would come from elsewhere too, and the compiler would let each step wait for the last
        wait(full + 8 * ring.stage, ring.phase);
        const u32 at = first + (STAGE >> 4) * ring.stage;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < DEPTH / 16; ++step) {
            const u64 b = descriptor(at + right + step * (RIGHT_ROWS ? 2048 : 32) / 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                multiply<LEFT_T, RIGHT_ROWS>(acc[i], descriptor(at + (BOX_BYTES * i + step * (LEFT_T ? 2048 : 32)) / 16), b, k + step);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (k > 0) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (lane == 0) arrive(before);
        }
        before = empty + 8 * ring.stage;
        ring.advance(1);
    } while (++k < steps);
    if (has_second) wait(full + 8 * ring.stage, ring.phase);
    if (lane == 0) arrive(next);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0) arrive(before);
    fence(acc[0]), fence(acc[1]);
}

// What becomes of the accumulators of 64 rows: element 32 * half + 4 * pair + 2 * h + e of a thread's is that of row
// 8 * h and column 64 * half + 8 * pair + e, from its own first row and column on.

__device__ __forceinline__ u32 packed(float low, float high, bool is_bf16) {
    u32 found;
    if (is_bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
    }
    return found;
}
__device__ __forceinline__ void add(float& low, float& high, float factor, u32 pair) {
    float first, second;
#if FP16
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(first), "=f"(second) : "r"(pair));
#else
    first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xFFFF0000);
#endif
    low = fmaf(factor, first, low), high = fmaf(factor, second, high);
}
__device__ __forceinline__ void load4(u32 (&m)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void store4(u32 at, const u32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}
__device__ __forceinline__ void store4_transposed(u32 at, const u32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

// Eight by eight elements four times, as `load4` and `store4` take them: two above each other, and two pairs side by side.
// `rows_at` is where this lane's row begins in the staging, in whose rows blocks of eight are swizzled.
__device__ __forceinline__ u32 place_of(int four, u32 rows_at, int line, int next) {
    return rows_at + (four / 4) * BOX_BYTES + (((2 * (four % 4) + next) ^ line) << 4);
}

// An addend that lies in shared memory as the result will.
__device__ __forceinline__ void add_staged(float (&d)[64], float factor, u32 rows_at, int line, int next) {
#pragma unroll
    for (int four = 0; four < 8; ++four) {
        u32 m[4];
        load4(m, place_of(four, rows_at, line, next));
#pragma unroll
        for (int n = 0; n < 4; ++n) add(d[8 * four + 2 * n], d[8 * four + 2 * n + 1], factor, m[n]);
    }
}

__device__ __forceinline__ void add_diagonal(float (&d)[64], float diagonal, int row, int col) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
        const int away = row + 8 * (n % 2) - (col + 8 * (n / 2));
        if (away == 0) d[2 * n] += diagonal;
        if (away == 1) d[2 * n + 1] += diagonal;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) run_chain(const __grid_constant__ Chain chain) {
    extern __shared__ char raw[];
    const u32 base = (address(raw) + 1023) & ~1023u, stagings = base + STAGES * STAGE;
    const u32 full = stagings + 2 * STAGING, empty = full + 8 * STAGES, order = empty + 8 * STAGES, open = order + 16;
    const u32 ready = open + 8 * TURNS, begun = ready + 16, mirrored = begun + 16, staged = mirrored + 16;
    const u32 tasks = staged + 32;  // of turns, modulo TURNS
    const u32 total = chain.batch * chain.tiles_of_matrix;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, WARPS);
        for (int n = 0; n < TURNS; ++n) init_barrier(open + 8 * n, 1);
        init_barrier(begun, 1);
        for (int who = 0; who < 2; ++who) {
            init_barrier(order + 8 * who, WARPS), init_barrier(ready + 8 * who, 1);
            init_barrier(mirrored + 8 * who, 1), init_barrier(staged + 16 * who, WARPS), init_barrier(staged + 16 * who + 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    // One lane's word for what all lanes of a warp have alike: so the compiler sees that they do, and that what follows from it may
    // lie in registers that a warp shares, as what tensor cores are told must. It was read out of one lane before each product.
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / GROUP, 0), warp = __shfl_sync(0xFFFFFFFF, threadIdx.x % GROUP / 32, 0);
    const int lane = threadIdx.x % 32;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (lane != 0) return;
        if (warp == 0) {
            // Operands.
            Ring ring = {0, 1};
            for (u32 turn = 0;; ++turn) {
                wait(open + 8 * (turn % TURNS), turn / TURNS & 1);
                const Task task = told(tasks + 16 * (turn % TURNS));
                if (task.product < 0) break;
                arrive(begun);
                fence_copies();
                const Product& product = chain.products[task.product];
                const bool is_tall = product.kind == TALL, is_wide = product.kind == WIDE;
                const bool is_one = product.kind != PLAIN && task.row == task.col;  // both operands are the same
                const bool is_apart = task.batch >= product.part;
                const int batch = is_apart ? task.batch - product.part : task.batch;
                const Map& left = chain.maps[product.left + is_apart];
                const Map& right = chain.maps[product.right + is_apart];
                for (int k = 0; k < product.steps * DEPTH; k += DEPTH) {
                    const u32 bar = full + 8 * ring.stage, at = base + STAGE * ring.stage;
                    wait(empty + 8 * ring.stage, ring.phase);
                    expect(bar, is_one ? OPERAND : STAGE);
                    for (int i = 0; i < 2; ++i) {
                        const int row = task.row + BOX * i;
                        load(at + BOX_BYTES * i, left, is_tall ? row : k, is_tall ? k : row, batch, bar);
                    }
                    for (int i = 0; i < 2 && !is_one; ++i) {
                        const int col = task.col + BOX * i;
                        load(at + OPERAND + BOX_BYTES * i, right, is_wide ? k : col, is_wide ? col : k, batch, bar);
                    }
                    ring.advance(1);
                }
                if (product.second >= 0) {
                    const u32 bar = full + 8 * ring.stage;
                    wait(empty + 8 * ring.stage, ring.phase);
                    expect(bar, TILE_BYTES);
                    load_tile(base + STAGE * ring.stage, chain.maps[product.second], task.row, task.col, task.batch, bar);
                    ring.advance(1);
                }
            }
        } else if (warp == 1) {
            // Tasks, and earlier products, a turn ahead of the thread that loads operands.
            int seen = -1;  // the product and the matrix of the task before
            for (u32 turn = 0;; ++turn) {
                if (turn > 0) wait(begun, (turn - 1) & 1);
                const u32 number = atomicAdd(chain.next, 1) - chain.first_number;
                if (number >= total) {
                    for (u32 last = turn; last < turn + 2; ++last) {  // one for each thread that stores
                        tell(tasks + 16 * (last % TURNS), {-1, 0, 0, 0});
                        arrive(open + 8 * (last % TURNS));
                    }
                    break;
                }
                const Task task = task_at(chain, number);
                tell(tasks + 16 * (turn % TURNS), task);
                const Product& product = chain.products[task.product];
                const int next = task.product * chain.batch + task.batch;
                if (task.product > 0 && next != seen) {
                    while (count_of(chain.counters + task.batch) < chain.tiles_done + product.tiles_before) {}
                }
                seen = next;
                fence_copies();
                arrive(open + 8 * (turn % TURNS));
            }
        } else {
            // Addends and stores of one group. A tile counts as soon as it is in memory: others may be waiting for nothing else.
            const u32 who = warp - 2, at = stagings + STAGING * who;
            u32 phase = 0;
            for (u32 turn = who;; turn += 2, phase ^= 1) {
                wait(open + 8 * (turn % TURNS), turn / TURNS & 1);
                const Task task = told(tasks + 16 * (turn % TURNS));
                if (task.product < 0) break;
                fence_copies();
                const Product& product = chain.products[task.product];
                const u32 bar = ready + 8 * who;
                if (product.first >= 0) {
                    expect(bar, TILE_BYTES);
                    load_tile(at, chain.maps[product.first], task.row, task.col, task.batch, bar);
                } else {
                    arrive(bar);
                }
                const Map& out = chain.maps[product.out];
                const bool is_mirrored = product.is_symmetric && task.row != task.col;
                for (int i = 0; i < 2; ++i) {
                    const int row = task.row + BOX * i;
                    wait(staged + 16 * who + 8 * i, phase);
                    for (int n = 0; n < 2; ++n) {
                        store(out, task.col + BOX * n, row, task.batch, at + HALF_BYTES * i + BOX_BYTES * n);
                        if (is_mirrored) store(out, row, task.col + BOX * n, task.batch, at + TILE_BYTES + BOX_BYTES * n);
                    }
                    commit_stores();
                    wait_until_read();
                    if (i == 0) arrive(mirrored + 8 * who);
                }
                wait_until_stored();
                fence_copies();
                count_one(chain.counters + task.batch);
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 who = group - 1, staging = stagings + STAGING * who, mirror = staging + TILE_BYTES, other = order + 8 * (1 - who);
    // Where this lane's rows of small matrices go, in the tile and in its mirror image.
    const int part = lane >> 3, half_row = part & 1, next = part >> 1, line = lane & 7;
    const u32 rows_at = staging + (warp * 16 + 8 * half_row + line) * 128;
    const u32 mirror_at = mirror + (8 * next + line) * 128 + (((2 * warp + half_row) ^ line) << 4);
    Ring ring = {0, 0};
    u32 phase = 0;
    for (u32 turn = 0;; ++turn) {
        wait(open + 8 * (turn % TURNS), turn / TURNS & 1);
        const Task task = told(tasks + 16 * (turn % TURNS));
        if (task.product < 0) break;
        const Product& product = chain.products[task.product];
        if ((turn & 1) != who) {
            ring.advance(stages_of(product));
            continue;
        }
        const int kind = product.kind, steps = product.steps;
        const bool is_bf16 = product.is_bf16, has_second = product.second >= 0;
        const bool is_diagonal = task.row == task.col, is_mirrored = product.is_symmetric && !is_diagonal;
        const u32 right_at = kind != PLAIN && is_diagonal ? 0 : OPERAND;
        const float scale = product.scales ? __ldg(product.scales + task.batch) : 1.0f;
        // A barrier tells two phases apart, no more: who came two tiles early would take an old one for its own.
        wait(order + 8 * who, phase ^ (1 - who));
        float acc[2][64];
        if (kind == PLAIN) {
            multiply_all<0, 1>(acc, ring, steps, base, right_at, full, empty, has_second, other, lane);
        } else if (kind == WIDE) {
            multiply_all<0, 0>(acc, ring, steps, base, right_at, full, empty, has_second, other, lane);
        } else {
            multiply_all<1, 1>(acc, ring, steps, base, right_at, full, empty, has_second, other, lane);
        }
        wait(ready + 8 * who, phase);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int n = 0; n < 64; ++n) acc[i][n] = __fmul_rn(acc[i][n], product.alpha);
            if (product.first >= 0) add_staged(acc[i], product.beta, rows_at + HALF_BYTES * i, line, next);
        }
        if (has_second) {
#pragma unroll
            for (int i = 0; i < 2; ++i) add_staged(acc[i], product.gamma, rows_at - staging + base + STAGE * ring.stage + HALF_BYTES * i, line, next);
            fence_staging();  // it is written by a copy next
            __syncwarp();
            if (lane == 0) arrive(empty + 8 * ring.stage);
            ring.advance(1);
        }
        const int row = task.row + warp * 16 + lane / 4, col = task.col + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float(&d)[64] = acc[i];
            const u32 half_at = rows_at + HALF_BYTES * i;
            if (is_diagonal && product.diagonal != 0.0f) add_diagonal(d, product.diagonal, row + BOX * i, col);
            u32 m[8][4];
#pragma unroll
            for (int four = 0; four < 8; ++four) {
#pragma unroll
                for (int n = 0; n < 4; ++n) m[four][n] = packed(d[8 * four + 2 * n] * scale, d[8 * four + 2 * n + 1] * scale, is_bf16);
                store4(place_of(four, half_at, line, next), m[four]);
            }
            if (is_mirrored) {
                if (i == 1) wait(mirrored + 8 * who, phase);
#pragma unroll
                for (int four = 0; four < 8; ++four) store4_transposed(mirror_at + 2048 * four, m[four]);
            }
            fence_staging();
            __syncwarp();
            if (lane == 0) arrive(staged + 16 * who + 8 * i);
        }
        phase ^= 1;
    }
}
