/* SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), for the store's job token. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SHA256_SIZE 32

void hmac_sha256(const void *key, size_t key_size, const void *message, size_t message_size,
                 uint8_t digest[SHA256_SIZE]);

/* Compares in a time that does not depend on where the first difference is. */
bool sha256_same(const uint8_t a[SHA256_SIZE], const uint8_t b[SHA256_SIZE]);
