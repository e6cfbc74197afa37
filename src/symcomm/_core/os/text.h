/* Reads small files of the kernel's, such as those under /proc. */
#pragma once

#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

/* Reads as much as fits into `text`. False: there is no such file, or it is empty. */
static inline bool read_text(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, size - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0;
}
