/* The headers of plain tar archives: tar_walk.py loads this, and [Note: Plain archives] there explains it.

   Everything here may give up (ODD): the caller then walks in Python, which knows all of tar and says what is wrong. So
   a header is taken only if it is certain what Python would make of it. No byte is read or written outside of what is
   handed in, whatever it holds. */

#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { VERSION = 1, RECORD = 512, NAME_BYTES = 100, EXTENSION_BYTES = 32, MOST_EXTENSIONS = 62, MOST_PAX_BYTES = 1 << 16 };
enum { ODD = -1, END = 0, MEMBER = 1, MORE = 2 };
enum { LEAST_BYTES = 16 << 10 };

int tar_version(void) { return VERSION; }

/* A regular file of the archive; places are those of the file, `name` lies in the bytes that were looked at. */
struct member {
    int64_t first, data, num_bytes;
    const uint8_t *name;
    int name_length, key_length; /* no key: it belongs to no sample */
};

static int64_t padded(int64_t num_bytes) { return (num_bytes + RECORD - 1) / RECORD * RECORD; }

/* Return an octal number between spaces and zeros, or ODD. */
static int64_t number(const uint8_t *field, int size) {
    int at = 0;
    int64_t value = 0;
    while (at < size && (field[at] == 0 || field[at] == ' ')) at++;
    while (at < size && field[at] >= '0' && field[at] <= '7') value = value << 3 | (field[at++] - '0');
    while (at < size && (field[at] == 0 || field[at] == ' ')) at++;
    return at == size ? value : ODD;
}

static int is_intact(const uint8_t *header) {
    uint32_t sum = 0;
    for (int i = 0; i < RECORD; i++) sum += header[i];
    for (int i = 148; i < 156; i++) sum += ' ' - header[i];
    return number(header + 148, 8) == (int64_t)sum;
}

static int is_empty(const uint8_t *record) {
    static const uint8_t zeros[RECORD];
    return !record[0] && !memcmp(record, zeros, RECORD);
}

static int is_any(uint8_t kind, const char *kinds) { return kind && strchr(kinds, kind) != NULL; }

/* Return whether a pax header may say what follows is called, or how large it is. */
static int names_or_sizes(const uint8_t *data, int64_t num_bytes) {
    const uint8_t *end = data + num_bytes;
    for (const uint8_t *at = data; end - at >= 5 && (at = memchr(at, '=', (size_t)(end - at))); at++)
        if (at - data >= 4 && (!memcmp(at - 4, "path", 4) || !memcmp(at - 4, "size", 4))) return 1;
    return 0;
}

/* Find the member's key: its name up to the first dot behind the last slash. */
static int find_key(struct member *m) {
    const uint8_t *dot = NULL, *last = m->name;
    m->key_length = 0;
    for (const uint8_t *at = m->name; at < m->name + m->name_length; at++) {
        if (*at == '\n') return ODD;
        if (*at == '/') last = at + 1, dot = NULL;
        if (*at == '.' && !dot) dot = at;
    }
    if (m->name_length > 1 && m->name[0] == '_' && m->name[1] == '_') return ODD; /* perhaps not a sample's */
    if (dot == last) return ODD;
    if (!dot) return MEMBER;
    for (const uint8_t *at = dot; at < m->name + m->name_length; at++)
        if (*at >= 128) return ODD; /* to be made lower case */
    m->key_length = (int)(dot - m->name);
    return MEMBER;
}

/* Find the regular file that follows `*place`, and set `*place` behind it. `bytes` lie at `base` of what ends at `end`.
   MORE: its headers lie behind them, from `*place` on. */
static int next_member(const uint8_t *bytes, int64_t have, int64_t base, int64_t end, int checks, int64_t *place,
                       struct member *m) {
    int64_t at = *place;
    while (at < end) {
        if (at < base || end - at < RECORD) return ODD;
        if (at - base > have - RECORD) return MORE;
        const uint8_t *header = bytes + (at - base);
        if (is_empty(header)) return END;
        if (checks && !is_intact(header)) return ODD;
        uint8_t kind = header[156];
        int64_t size = is_any(kind, "123456") ? 0 : number(header + 124, 12), data = at + RECORD;
        if (size < 0 || size > end - data || is_any(kind, "LS")) return ODD;
        if (is_any(kind, "Kxg")) {
            if (kind == 'x') {
                if (size > MOST_PAX_BYTES) return ODD;
                if (data - base > have - size) return MORE;
                if (names_or_sizes(bytes + (data - base), size)) return ODD;
            }
            at = data + padded(size);
            continue;
        }
        if (kind == 0 || kind == '0' || kind == '7') {
            if (header[345] && !memcmp(header + 257, "ustar", 6)) return ODD; /* a name in two parts */
            const uint8_t *name_end = memchr(header, 0, NAME_BYTES);
            *m = (struct member){*place, data, size, header, name_end ? (int)(name_end - header) : NAME_BYTES, 0};
            *place = data + padded(size);
            return find_key(m);
        }
        *place = at = data + padded(size);
    }
    return at == end && !checks ? END : ODD;
}

/* The key of the sample that the members before belong to. */
struct key {
    uint8_t text[NAME_BYTES];
    int length;
};

static int begins_sample(struct key *key, const struct member *m) {
    if (key->length == m->key_length && !memcmp(key->text, m->name, (size_t)key->length)) return 0;
    key->length = m->key_length;
    memcpy(key->text, m->name, (size_t)key->length);
    return 1;
}

/* Write for each member of a sample: where its first header and its data begin, its bytes, the lengths of its name and
   of the key in it, and whether it begins a sample. Its name lies a record before its data. Return how many members
   there are, or ODD. */
int64_t tar_members(const uint8_t *bytes, int64_t num_bytes, int64_t *rows, int64_t most_rows) {
    struct key key = {.length = 0};
    struct member m;
    int64_t place = 0, count = 0;
    for (;;) {
        int found = next_member(bytes, num_bytes, 0, num_bytes, 0, &place, &m);
        if (found == END) return count;
        if (found != MEMBER || count == most_rows) return ODD;
        if (!m.key_length) continue;
        int64_t row[6] = {m.first, m.data, m.num_bytes, m.name_length, m.key_length, begins_sample(&key, &m)};
        memcpy(rows + 6 * count++, row, sizeof row);
    }
}

/* A part of a file: `have` bytes from `base` on. */
struct window {
    int descriptor;
    uint8_t *bytes;
    int64_t most, have, base, next_bytes;
};

/* Read on from a place; what was read from there on is kept. Return 0 at the file's end, or if it cannot be read. */
static int read_on(struct window *w, int64_t place, int64_t end) {
    int64_t left = w->base + w->have - place;
    if (left > 0)
        memmove(w->bytes, w->bytes + (place - w->base), (size_t)left);
    else {
        if (left < 0) w->next_bytes = LEAST_BYTES; /* a large member was passed over */
        left = 0;
    }
    w->base = place, w->have = left;
    int64_t size = w->next_bytes < w->most - left ? w->next_bytes : w->most - left;
    if (size > end - place - left) size = end - place - left;
    if (size <= 0) return 0;
    ssize_t got = pread(w->descriptor, w->bytes + left, (size_t)size, (off_t)(place + left));
    if (got <= 0) return 0;
    w->have += got;
    w->next_bytes = 2 * w->next_bytes < w->most ? 2 * w->next_bytes : w->most;
    return 1;
}

/* What the samples of a file are checked against, and how they are cut into blocks. */
struct plan {
    int64_t block_bytes, block_samples, most_block_bytes; /* as in sample_rows.py */
    int64_t num_required; /* extensions that every sample has, and others too; 0: those of the first, and no others */
    int64_t num_extensions;
    uint8_t extensions[MOST_EXTENSIONS][EXTENSION_BYTES]; /* padded with zeros; the required ones come first */
};

/* Return the number of an extension, which is added to the plan if it is new; or ODD. */
static int extension_number(struct plan *plan, const struct member *m, int guess) {
    uint8_t text[EXTENSION_BYTES] = {0};
    int length = m->name_length - m->key_length - 1;
    if (length >= EXTENSION_BYTES) return ODD;
    for (int i = 0; i < length; i++) {
        uint8_t letter = m->name[m->key_length + 1 + i];
        text[i] = letter >= 'A' && letter <= 'Z' ? (uint8_t)(letter + 32) : letter;
    }
    if (guess < plan->num_extensions && !memcmp(plan->extensions[guess], text, EXTENSION_BYTES)) return guess;
    for (int i = 0; i < plan->num_extensions; i++)
        if (!memcmp(plan->extensions[i], text, EXTENSION_BYTES)) return i;
    if (plan->num_extensions == MOST_EXTENSIONS) return ODD;
    memcpy(plan->extensions[plan->num_extensions], text, EXTENSION_BYTES);
    return (int)plan->num_extensions++;
}

/* The samples of a file that were found, as blocks of (rows, first byte, bytes). */
struct blocks {
    int64_t *numbers, most, count, rows, start, end;
};

static int end_block(struct blocks *b) {
    if (b->count == b->most) return 0;
    int64_t block[3] = {b->rows, b->start, b->end - b->start};
    memcpy(b->numbers + 3 * b->count++, block, sizeof block);
    b->rows = 0;
    return 1;
}

/* Add a sample with these extensions; return 0 for one that Python has to look at. */
static int add_sample(struct blocks *b, struct plan *plan, uint64_t *required, uint64_t mask, int64_t start, int64_t end) {
    if (!*required) *required = mask;
    if (plan->num_required ? (mask & *required) != *required : mask != *required) return 0;
    int64_t limit = b->rows + 1 > plan->block_samples ? plan->block_bytes : plan->most_block_bytes;
    if (b->rows && end - b->start > limit) {
        if (!end_block(b)) return 0;
        b->start = start;
    }
    b->rows++, b->end = end;
    return 1;
}

/* Find the blocks of a file of `num_bytes`; return how many there are, or ODD. `buffer` has room for `most_bytes`. */
int64_t tar_index(int descriptor, int64_t num_bytes, struct plan *plan, uint8_t *buffer, int64_t most_bytes,
                  int64_t *numbers, int64_t most_blocks) {
    struct window w = {descriptor, buffer, most_bytes, 0, 0, LEAST_BYTES};
    struct blocks blocks = {numbers, most_blocks, 0, 0, 0, 0};
    struct key key = {.length = 0};
    struct member m;
    uint64_t mask = 0, required = plan->num_required ? ((uint64_t)1 << plan->num_required) - 1 : 0;
    int64_t place = 0, start = 0, end = 0;
    int next_extension = 0;
    for (;;) {
        int found = next_member(w.bytes, w.have, w.base, num_bytes, 1, &place, &m);
        if (found == MORE) {
            if (!read_on(&w, place, num_bytes)) return ODD;
            continue;
        }
        if (found != MEMBER && found != END) return ODD;
        if (found == MEMBER && !m.key_length) continue;
        if (found == END || begins_sample(&key, &m)) {
            if (mask && !add_sample(&blocks, plan, &required, mask, start, end)) return ODD;
            if (found == END) return !blocks.rows || end_block(&blocks) ? blocks.count : ODD;
            mask = 0, start = m.first, next_extension = 0;
        }
        int extension = extension_number(plan, &m, next_extension);
        if (extension == ODD || mask >> extension & 1) return ODD;
        mask |= (uint64_t)1 << extension;
        next_extension = extension + 1, end = m.data + padded(m.num_bytes);
    }
}
