/* Floats in fewer bytes, without loss: float_codec.py loads this, and [Note: Fewer bytes] there explains it.

   A float's exponent becomes a Huffman symbol; its sign and mantissa follow as 3 bytes. The two zeros are symbols of
   their own, without the 3 bytes. A message has four streams of symbols, one for each quarter of the floats, which are
   decoded side by side: one alone would wait for each table lookup.

   Message: kind (4 bytes); if it is CODED: code lengths (4 bits each), sizes of the 8 streams (4 bytes each), then the
   streams: symbols of a quarter, its mantissas, the next quarter. If it is RAW: the floats. Reading goes up to SLACK
   bytes beyond what was written. Little-endian machines only (float_codec.py checks). */

#include <stdint.h>
#include <string.h>

enum { VERSION = 1, RAW = 0, CODED = 1, SYMBOLS = 258, ZERO = 256, LENGTH_BYTES = 129, LONGEST = 12, QUARTERS = 4 };
enum { HEADER_BYTES = 4 + LENGTH_BYTES + 3 + 8 * 4, SLACK = 8192, CHUNK = 512 };

int codec_version(void) { return VERSION; }

/* How large a buffer of a message must be. */
int64_t codec_bound(int64_t count) { return 4 * count + HEADER_BYTES + SLACK; }

static inline uint32_t symbol_of(uint32_t bits) {
    uint32_t symbol = (bits >> 23) & 255;
    symbol = bits == 0 ? ZERO : symbol;
    return bits == 0x80000000u ? ZERO + 1 : symbol;
}

static int64_t first_of(int64_t count, int quarter) { return count * quarter / QUARTERS; }

/* Find code lengths of at most LONGEST bits; symbols that do not occur get 0. */
static void find_lengths(const uint32_t *counts, uint8_t *lengths) {
    int order[SYMBOLS], used = 0;
    memset(lengths, 0, SYMBOLS);
    for (int s = 0; s < SYMBOLS; s++)
        if (counts[s]) {
            int at = used++;
            for (; at > 0 && counts[order[at - 1]] > counts[s]; at--) order[at] = order[at - 1];
            order[at] = s;
        }
    if (used < 2) {
        for (int i = 0; i < used; i++) lengths[order[i]] = 1;
        return;
    }
    /* Two queues: the leaves by weight, and the inner nodes, which come in the order of their weights. */
    uint64_t weight[2 * SYMBOLS];
    int parent[2 * SYMBOLS], leaf = 0, inner = used, nodes = used;
    for (int i = 0; i < used; i++) weight[i] = counts[order[i]];
    while (nodes < 2 * used - 1) {
        int pair[2];
        for (int i = 0; i < 2; i++)
            pair[i] = leaf < used && (inner == nodes || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
        weight[nodes] = weight[pair[0]] + weight[pair[1]];
        parent[pair[0]] = parent[pair[1]] = nodes++;
    }
    int depth[2 * SYMBOLS], per_length[64] = {0};
    depth[nodes - 1] = 0;
    for (int i = nodes - 2; i >= 0; i--) {
        depth[i] = depth[parent[i]] + 1;
        if (i < used) per_length[depth[i] > LONGEST ? LONGEST : depth[i]]++;
    }
    /* Where codes were cut to LONGEST they no longer fit beside each other: lengthen shorter ones until they do. */
    int64_t total = 0;
    for (int length = 1; length <= LONGEST; length++) total += (int64_t)per_length[length] << (LONGEST - length);
    while (total > 1 << LONGEST) {
        int length = LONGEST - 1;
        while (!per_length[length]) length--;
        per_length[length]--, per_length[length + 1] += 2, per_length[LONGEST]--;
        total--;
    }
    int next = 0;
    for (int length = LONGEST; length > 0; length--)
        for (int i = 0; i < per_length[length]; i++) lengths[order[next++]] = (uint8_t)length;
}

/* Return whether code lengths make a code; write the codes, last bit first. */
static int find_codes(const uint8_t *lengths, uint32_t *codes) {
    int64_t per_length[LONGEST + 1] = {0}, first[LONGEST + 2] = {0}, total = 0;
    for (int s = 0; s < SYMBOLS; s++) {
        if (lengths[s] > LONGEST) return 0;
        if (lengths[s]) per_length[lengths[s]]++;
    }
    for (int length = 1; length <= LONGEST; length++) {
        total += per_length[length] << (LONGEST - length);
        first[length + 1] = (first[length] + per_length[length]) << 1;
    }
    if (total > 1 << LONGEST) return 0;
    for (int s = 0; s < SYMBOLS; s++) {
        uint32_t code = lengths[s] ? (uint32_t)first[lengths[s]]++ : 0, reversed = 0;
        for (int i = 0; i < lengths[s]; i++) reversed |= ((code >> i) & 1) << (lengths[s] - 1 - i);
        codes[s] = reversed;
    }
    return 1;
}

static int64_t put_raw(const float *in, int64_t count, uint8_t *out) {
    uint32_t kind = RAW;
    memcpy(out, &kind, 4);
    memcpy(out + 4, in, 4 * (size_t)count);
    return 4 + 4 * count;
}

/* Write a message of `count` floats; return its bytes. */
int64_t codec_encode(const float *in, int64_t count, uint8_t *out) {
    uint32_t counts[QUARTERS][SYMBOLS], all[SYMBOLS] = {0}, codes[SYMBOLS], sizes[2 * QUARTERS];
    uint8_t lengths[SYMBOLS];
    const uint8_t *bytes = (const uint8_t *)in;
    memset(counts, 0, sizeof counts);
    for (int q = 0; q < QUARTERS; q++)
        for (int64_t i = first_of(count, q); i < first_of(count, q + 1); i++) {
            uint32_t bits;
            memcpy(&bits, bytes + 4 * i, 4);
            counts[q][symbol_of(bits)]++;
        }
    for (int q = 0; q < QUARTERS; q++)
        for (int s = 0; s < SYMBOLS; s++) all[s] += counts[q][s];
    find_lengths(all, lengths);
    find_codes(lengths, codes);
    int64_t total = HEADER_BYTES;
    for (int q = 0; q < QUARTERS; q++) {
        uint64_t num_bits = 0, mantissas = 0;
        for (int s = 0; s < SYMBOLS; s++) num_bits += (uint64_t)counts[q][s] * lengths[s];
        for (int s = 0; s < ZERO; s++) mantissas += counts[q][s];
        sizes[2 * q] = (uint32_t)((num_bits + 7) / 8), sizes[2 * q + 1] = (uint32_t)(3 * mantissas);
        total += sizes[2 * q] + sizes[2 * q + 1];
    }
    if (total >= 4 + 4 * count || count > (1 << 28)) return put_raw(in, count, out);
    uint32_t kind = CODED;
    memcpy(out, &kind, 4);
    memset(out + 4, 0, LENGTH_BYTES + 3);
    for (int s = 0; s < SYMBOLS; s++) out[4 + s / 2] |= (uint8_t)(lengths[s] << (4 * (s % 2)));
    memcpy(out + 4 + LENGTH_BYTES + 3, sizes, sizeof sizes);
    uint8_t *stream = out + HEADER_BYTES;
    for (int q = 0; q < QUARTERS; q++) {
        uint8_t *symbols = stream, *mantissas = stream + sizes[2 * q], saved[8];
        uint8_t *end = mantissas; /* symbols are written 8 bytes at a time: the mantissas come after them */
        int64_t first = first_of(count, q), last = first_of(count, q + 1);
        uint64_t buffer = 0;
        int held = 0;
        for (int64_t i = first; i < last; i++) {
            uint32_t bits, symbol;
            memcpy(&bits, bytes + 4 * i, 4);
            symbol = symbol_of(bits);
            buffer |= (uint64_t)codes[symbol] << held;
            held += lengths[symbol];
            if (held >= 48) {
                memcpy(symbols, &buffer, 8);
                symbols += 6, buffer >>= 48, held -= 48;
            }
        }
        memcpy(saved, &buffer, 8);
        memcpy(symbols, saved, (size_t)(end - symbols));
        for (int64_t i = first; i < last; i++) {
            uint32_t bits, value;
            memcpy(&bits, bytes + 4 * i, 4);
            value = (bits & 0x7fffff) | ((bits >> 31) << 23);
            memcpy(mantissas, &value, 4);
            mantissas += symbol_of(bits) < ZERO ? 3 : 0;
        }
        stream += sizes[2 * q] + sizes[2 * q + 1];
    }
    return total;
}

struct stream {
    const uint8_t *symbols, *symbols_end, *mantissas, *mantissas_end;
    uint64_t buffer;
    int held;
};

static inline float decode_one(struct stream *s, const uint16_t *table) {
    uint16_t entry = table[s->buffer & ((1 << LONGEST) - 1)];
    uint32_t symbol = entry >> 4, value, bits;
    float number;
    s->buffer >>= entry & 15, s->held -= entry & 15;
    memcpy(&value, s->mantissas, 4);
    bits = (symbol << 23) | (value & 0x7fffff) | ((value & 0x800000) << 8);
    s->mantissas += symbol < ZERO ? 3 : 0;
    bits = symbol < ZERO ? bits : symbol == ZERO ? 0 : 0x80000000u;
    memcpy(&number, &bits, 4);
    return number;
}

static inline void refill(struct stream *s) {
    uint64_t more;
    memcpy(&more, s->symbols, 8);
    s->buffer |= more << s->held;
    s->symbols += (63 - s->held) >> 3;
    s->held |= 56;
}

/* Read a message from a buffer of codec_bound(count) bytes into `count` floats, or add it to them; return 0 if it is
   none, as far as that can be seen. */
int codec_decode(const uint8_t *in, float *out, int64_t count, int add) {
    uint32_t kind, sizes[2 * QUARTERS], codes[SYMBOLS];
    uint8_t lengths[SYMBOLS];
    static const uint16_t unused = 1;
    uint16_t table[1 << LONGEST];
    memcpy(&kind, in, 4);
    if (kind == RAW) {
        if (!add) memcpy(out, in + 4, 4 * (size_t)count);
        for (int64_t i = 0; add && i < count; i++) {
            float number;
            memcpy(&number, in + 4 + 4 * i, 4);
            out[i] += number;
        }
        return 1;
    }
    if (kind != CODED) return 0;
    for (int s = 0; s < SYMBOLS; s++) lengths[s] = (in[4 + s / 2] >> (4 * (s % 2))) & 15;
    memcpy(sizes, in + 4 + LENGTH_BYTES + 3, sizeof sizes);
    if (!find_codes(lengths, codes)) return 0;
    for (int i = 0; i < 1 << LONGEST; i++) table[i] = unused;
    for (int s = 0; s < SYMBOLS; s++)
        for (uint32_t i = codes[s]; lengths[s] && i < 1 << LONGEST; i += 1u << lengths[s])
            table[i] = (uint16_t)(s << 4 | lengths[s]);
    struct stream streams[QUARTERS];
    float *to[QUARTERS];
    int64_t offset = HEADER_BYTES, fewest = INT64_MAX;
    for (int q = 0; q < QUARTERS; q++) {
        int64_t middle = offset + sizes[2 * q], end = middle + sizes[2 * q + 1];
        streams[q] = (struct stream){in + offset, in + middle, in + middle, in + end, 0, 0};
        to[q] = out + first_of(count, q);
        int64_t length = first_of(count, q + 1) - first_of(count, q);
        fewest = length < fewest ? length : fewest;
        offset = end;
    }
    if (offset > codec_bound(count) - SLACK) return 0;
    int64_t i = 0;
    for (; i + 4 <= fewest; i += 4) {
        for (int q = 0; q < QUARTERS; q++) refill(&streams[q]); /* 4 symbols of 12 bits */
        for (int j = 0; j < 4; j++)
            for (int q = 0; q < QUARTERS; q++) {
                float number = decode_one(&streams[q], table);
                to[q][i + j] = add ? to[q][i + j] + number : number;
            }
        if (i % CHUNK == 0)
            for (int q = 0; q < QUARTERS; q++)
                if (streams[q].symbols > streams[q].symbols_end + 8 || streams[q].mantissas > streams[q].mantissas_end)
                    return 0;
    }
    for (int q = 0; q < QUARTERS; q++) {
        int64_t length = first_of(count, q + 1) - first_of(count, q);
        for (int64_t k = i; k < length; k++) {
            refill(&streams[q]);
            float number = decode_one(&streams[q], table);
            to[q][k] = add ? to[q][k] + number : number;
        }
        if (streams[q].mantissas != streams[q].mantissas_end) return 0;
    }
    return 1;
}
