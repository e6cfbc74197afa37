#include "store/sha256.h"

#include <string.h>

struct sha256 {
    uint32_t state[8];
    uint64_t length; /* bytes seen so far */
    uint8_t block[64];
};

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t rotate(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

static inline uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void compress(uint32_t state[8], const uint8_t *block) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++) w[i] = big_endian(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
        uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + round_constants[i] + w[i];
        uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
        uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1;
        d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

static void sha256_begin(struct sha256 *sha) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(sha->state, start, sizeof start);
    sha->length = 0;
}

static void sha256_add(struct sha256 *sha, const void *bytes, size_t size) {
    const uint8_t *at = bytes;
    while (size > 0) {
        size_t used = sha->length % 64;
        size_t part = size < 64 - used ? size : 64 - used;
        memcpy(sha->block + used, at, part);
        sha->length += part, at += part, size -= part;
        if (used + part == 64) compress(sha->state, sha->block);
    }
}

static void sha256_end(struct sha256 *sha, uint8_t digest[SHA256_SIZE]) {
    uint64_t bits = sha->length * 8;
    uint8_t tail[72] = {0x80};
    size_t pad = (sha->length % 64 < 56 ? 56 : 120) - sha->length % 64;
    for (int i = 0; i < 8; i++) tail[pad + (size_t)i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_add(sha, tail, pad + 8);
    for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(sha->state[i / 4] >> (24 - 8 * (i % 4)));
}

void hmac_sha256(const void *key, size_t key_size, const void *message, size_t message_size,
                 uint8_t digest[SHA256_SIZE]) {
    uint8_t block[64] = {0}, pad[64];
    struct sha256 sha;
    if (key_size > sizeof block) {
        sha256_begin(&sha);
        sha256_add(&sha, key, key_size);
        sha256_end(&sha, block);
    } else if (key_size > 0) {
        memcpy(block, key, key_size);
    }
    for (int i = 0; i < 64; i++) pad[i] = block[i] ^ 0x36;
    sha256_begin(&sha);
    sha256_add(&sha, pad, sizeof pad);
    sha256_add(&sha, message, message_size);
    sha256_end(&sha, digest);
    for (int i = 0; i < 64; i++) pad[i] = block[i] ^ 0x5c;
    sha256_begin(&sha);
    sha256_add(&sha, pad, sizeof pad);
    sha256_add(&sha, digest, SHA256_SIZE);
    sha256_end(&sha, digest);
}

bool sha256_same(const uint8_t a[SHA256_SIZE], const uint8_t b[SHA256_SIZE]) {
    volatile uint8_t different = 0;
    for (int i = 0; i < SHA256_SIZE; i++) different |= a[i] ^ b[i];
    return different == 0;
}
