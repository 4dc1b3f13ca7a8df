/* The lane's innermost loops: the barrier, and the sum. engine.py loads them, and says what happens without them.

   [Note: Hand-over] holds here as it does in Python: data is handed over by sem_post and taken by sem_trywait, which
   synchronise memory, as POSIX guarantees. Every address that is passed in stays mapped during the call. A call keeps no
   state; the next call is told how far it had come. */

#define _GNU_SOURCE
#include <math.h>
#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { VERSION = 1, CELL_BYTES = 64, LOOKS = 32 };
_Static_assert(sizeof(sem_t) <= CELL_BYTES, "a semaphore has a cell of its own");

/* One rank's view of the block; engine.py has the same fields in the same order. */
struct lane {
    char *cells;         /* size * size semaphores: from each rank, one to each other rank */
    char *staging;       /* two areas, used in turn */
    int64_t size;        /* how many ranks */
    int64_t place;       /* the local rank of this one */
    int64_t slot_bytes;  /* from one rank's slot of an area to the next one's */
    int64_t area_bytes;  /* from the first area to the second */
    int64_t chunk_bytes; /* how much of a slot a sum uses */
    int64_t spin_ns;     /* how long to spin for one that has not arrived */
    int64_t crowded;     /* more ranks than cores: spinning takes time from the awaited rank */
};

/* engine.py has the same number; it changes with every change of the interface. */
int lane_version(void) { return VERSION; }

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static sem_t *cell(const struct lane *lane, int64_t from, int64_t to) {
    return (sem_t *)(lane->cells + (from * lane->size + to) * CELL_BYTES);
}

/* Spin for a post; return whether it was taken. */
static int take(sem_t *post, int looks, int64_t limit_ns) {
    if (!sem_trywait(post)) return 1;
    do {
        for (int look = 0; look < looks; look++) {
            relax();
            if (!sem_trywait(post)) return 1;
        }
        sched_yield(); /* the awaited rank may need this core */
        if (!sem_trywait(post)) return 1;
    } while (now_ns() < limit_ns);
    return 0;
}

/* Arrive at the barrier: post for every other rank. */
void lane_come(const struct lane *lane) {
    for (int64_t other = 0; other < lane->size; other++)
        if (other != lane->place) sem_post(cell(lane, lane->place, other));
}

/* Take the posts of the ranks from `first` on; return one that has not arrived in time, -1 if all have. */
int64_t lane_take(const struct lane *lane, int64_t first, int64_t deadline_ns) {
    int looks = lane->crowded ? 1 : LOOKS;
    for (int64_t other = first; other < lane->size; other++) {
        if (other == lane->place || !sem_trywait(cell(lane, other, lane->place))) continue;
        int64_t limit_ns = least(now_ns() + lane->spin_ns, deadline_ns);
        if (!take(cell(lane, other, lane->place), looks, limit_ns)) return other;
    }
    return -1;
}

/* A NaN's bits depend on the order of the operands, which the compiler may choose anew for each loop: all are one. */
#define ONE_NAN(total) ((total) == (total) ? (total) : NAN)
#define ITSELF(total) (total)

/* For the processor that it runs on, not the oldest that could be; chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_THIS_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_THIS_PROCESSOR
#endif

#define ADD_UP(name, type, cleaned)                                                                                    \
    FOR_THIS_PROCESSOR static void name(char *out, const char *slot, int64_t stride, int64_t size, int64_t num_bytes) {\
        type *total = (type *)out;                                                                                     \
        const type *first = (const type *)slot, *second = (const type *)(slot + stride);                               \
        int64_t count = num_bytes / (int64_t)sizeof(type);                                                             \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            type sum = (type)(first[i] + second[i]);                                                                   \
            total[i] = cleaned(sum);                                                                                   \
        }                                                                                                              \
        for (int64_t place = 2; place < size; place++) {                                                               \
            const type *next = (const type *)(slot + place * stride);                                                  \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                type sum = (type)(total[i] + next[i]);                                                                 \
                total[i] = cleaned(sum);                                                                               \
            }                                                                                                          \
        }                                                                                                              \
    }
ADD_UP(add_float, float, ONE_NAN)
ADD_UP(add_double, double, ONE_NAN)
ADD_UP(add_int32, uint32_t, ITSELF) /* unsigned: an overflow goes around, as torch's does */
ADD_UP(add_int64, uint64_t, ITSELF)
static void (*const ADDERS[])(char *, const char *, int64_t, int64_t, int64_t) = {add_float, add_double, add_int32,
                                                                                  add_int64};

/* The elements of a sum are in pieces, one after the other: a position in that row. */
struct spot {
    char *const *pieces;
    const int64_t *lengths; /* in bytes */
    int64_t piece, offset;
};

/* Return how many of the next `num_bytes` are contiguous. */
static int64_t together(const struct spot *spot, int64_t num_bytes) {
    return least(spot->lengths[spot->piece] - spot->offset, num_bytes);
}

static char *at(const struct spot *spot) { return spot->pieces[spot->piece] + spot->offset; }

static void pass(struct spot *spot, int64_t num_bytes) {
    spot->offset += num_bytes;
    if (spot->offset == spot->lengths[spot->piece]) spot->piece++, spot->offset = 0;
}

static void skip(struct spot *spot, int64_t num_bytes) {
    while (num_bytes > 0) {
        int64_t part = together(spot, num_bytes);
        pass(spot, part);
        num_bytes -= part;
    }
}

static void stage(char *slot, struct spot *from, int64_t num_bytes) {
    for (int64_t done = 0, part; done < num_bytes; done += part) {
        part = together(from, num_bytes - done);
        memcpy(slot + done, at(from), (size_t)part);
        pass(from, part);
    }
}

static void add_up(const struct lane *lane, int64_t kind, struct spot *to, const char *slots, int64_t num_bytes) {
    for (int64_t done = 0, part; done < num_bytes; done += part) {
        part = together(to, num_bytes - done);
        ADDERS[kind](at(to), slots + done, lane->slot_bytes, lane->size, part);
        pass(to, part);
    }
}

/* Add up, in the order of the ranks, what the ranks' pieces hold, in place: `num_bytes` on every rank, in pieces that
   may differ.

   `turn` is the area that was used last. `moment` is 0 at first. Returns -1 when all is done, else a moment: this rank
   has arrived at the barrier of chunk moment / (size + 1), the posts of the ranks before moment % (size + 1) have been
   taken, and that rank has not arrived. Once it has, call again with the next moment. */
int64_t lane_sum(const struct lane *lane, int64_t turn, char *const *pieces, const int64_t *lengths, int64_t num_bytes,
                 int64_t kind, int64_t moment, int64_t deadline_ns) {
    const int64_t moments = lane->size + 1; /* of a chunk: before each rank, and after the last */
    int64_t chunk = moment / moments, first = moment % moments;
    int64_t start = chunk * lane->chunk_bytes;
    struct spot to = {pieces, lengths, 0, 0}, from = to;
    skip(&to, start);
    if (moment > 0) skip(&from, least(start + lane->chunk_bytes, num_bytes));
    for (int staged = moment > 0; start < num_bytes; start += lane->chunk_bytes, chunk++, staged = 0, first = 0) {
        int64_t part = least(num_bytes - start, lane->chunk_bytes);
        char *slots = lane->staging + ((turn + 1 + chunk) & 1) * lane->area_bytes;
        if (!staged) {
            stage(slots + lane->place * lane->slot_bytes, &from, part);
            lane_come(lane);
        }
        int64_t late = lane_take(lane, first, deadline_ns);
        if (late >= 0) return chunk * moments + late;
        add_up(lane, kind, &to, slots, part);
    }
    return -1;
}
