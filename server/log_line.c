/* SPDX-License-Identifier: Apache-2.0
 *
 * Composing log lines: the only place where foreign text becomes part of one.
 */
#include "server/log_line.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* Kept free of values, so that closing quotes, braces and the newline always fit. */
#define TAIL 16
#define MESSAGE_MAX 2048
#define VALUE_MAX 512

static size_t room(const struct log_line *line) { return line->length < LOG_LINE_MAX - TAIL ? LOG_LINE_MAX - TAIL - line->length : 0; }

/* Ours, short and clean; all or nothing. */
static bool append(struct log_line *line, const char *text, size_t length)
{
    if (length > room(line))
        return false;
    memcpy(line->text + line->length, text, length);
    line->length += length;
    return true;
}

/* Closes a value, also one that was cut for want of room: TAIL keeps some. */
static void append_quote(struct log_line *line) { line->text[line->length++] = '"'; }

/* Length of the valid UTF-8 sequence at `s` (of which `left` bytes exist), 0 when it is none. Surrogates, overlong forms and
 * C1 controls are none, either. */
static size_t utf8_length(const unsigned char *s, size_t left)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || left < length)
        return 0;
    uint32_t point = s[0] & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        point = point << 6 | (s[i] & 0x3fu);
    }
    bool surrogate = point >= 0xd800 && point < 0xe000;
    bool invisible = point < 0xa0 || (point >= 0x2028 && point <= 0x202e) || (point >= 0x2066 && point <= 0x2069);
    return point < least[length] || point > 0x10ffff || surrogate || invisible ? 0 : length;
}

/* Text of any origin, escaped; `quoted` when it stands between quotes. At most `limit` bytes of it are shown. */
static void append_escaped(struct log_line *line, const char *value, size_t limit, bool quoted)
{
    size_t length = strnlen(value, limit + 1);
    bool cut = length > limit;
    if (cut)
        length = limit;
    for (size_t i = 0; i < length;) {
        unsigned char c = (unsigned char)value[i];
        char escape[8];
        size_t used = 1;
        bool fits;
        if (c >= 0x80 && (used = utf8_length((const unsigned char *)value + i, length - i)) > 0) {
            fits = append(line, value + i, used);
        } else if (quoted && (c == '"' || c == '\\')) {
            escape[0] = '\\';
            escape[1] = (char)c;
            fits = append(line, escape, 2);
            used = 1;
        } else if (c < 0x20 || c >= 0x7f) {
            int size = line->format == LOG_FORMAT_JSON ? snprintf(escape, sizeof escape, "\\u%04x", c)
                                                       : snprintf(escape, sizeof escape, "\\x%02x", c);
            fits = append(line, escape, (size_t)size);
            used = 1;
        } else {
            fits = append(line, value + i, 1);
        }
        if (!fits)
            return;
        i += used;
    }
    if (cut)
        append(line, "...", 3);
}

static void append_time(struct log_line *line)
{
    struct timespec now;
    struct tm utc;
    char text[64];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t length = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    length += (size_t)snprintf(text + length, sizeof text - length, ".%03ldZ", now.tv_nsec / 1000000);
    append(line, text, length);
}

void log_line_begin(struct log_line *line, enum log_format format, bool color, enum log_level level, const char *message)
{
    static const char *const name[] = {"debug", "info", "warning", "error"};
    static const char *const paint[] = {"\x1b[2m", "", "\x1b[33m", "\x1b[31m"};
    line->format = format;
    line->color = color;
    line->length = 0;
    if (format == LOG_FORMAT_JSON) {
        append(line, "{\"time\":\"", 9);
        append_time(line);
        append(line, "\",\"level\":\"", 11);
        append(line, name[level], strlen(name[level]));
        append(line, "\",\"message\":\"", 13);
        append_escaped(line, message, MESSAGE_MAX, true);
        append_quote(line);
        return;
    }
    append_time(line);
    append(line, " ", 1);
    if (color)
        append(line, paint[level], strlen(paint[level]));
    append(line, name[level], strlen(name[level]));
    if (color && *paint[level])
        append(line, "\x1b[0m", 4);
    append(line, " ", 1);
    append_escaped(line, message, MESSAGE_MAX, false);
}

/* A field that can't begin is left out whole. */
static bool begin_field(struct log_line *line, const char *key)
{
    size_t length = strlen(key);
    if (room(line) < length + 8)
        return false;
    if (line->format == LOG_FORMAT_JSON) {
        append(line, ",\"", 2);
        append(line, key, length);
        append(line, "\":", 2);
    } else {
        append(line, " ", 1);
        append(line, key, length);
        append(line, "=", 1);
    }
    return true;
}

/* In text, values that a reader could take for several words are quoted. */
static bool is_plain(const char *value)
{
    for (const unsigned char *c = (const unsigned char *)value; *c; c++) {
        if (*c <= ' ' || *c == '"' || *c == '=' || *c == '\\' || *c == 0x7f)
            return false;
    }
    return *value != '\0';
}

void log_line_add_text(struct log_line *line, const char *key, const char *value)
{
    if (!begin_field(line, key))
        return;
    bool quoted = line->format == LOG_FORMAT_JSON || !is_plain(value);
    if (quoted)
        append(line, "\"", 1);
    append_escaped(line, value, VALUE_MAX, quoted);
    if (quoted)
        append_quote(line);
}

void log_line_add_number(struct log_line *line, const char *key, int64_t value)
{
    char text[24];
    int length = snprintf(text, sizeof text, "%" PRId64, value);
    if (room(line) >= strlen(key) + 8 + (size_t)length && begin_field(line, key))
        append(line, text, (size_t)length);
}

void log_line_end(struct log_line *line)
{
    if (line->format == LOG_FORMAT_JSON)
        line->text[line->length++] = '}';
    line->text[line->length++] = '\n';
}

void log_format_bytes(char out[16], double bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t i = 0;
    while (bytes >= 1024 && i + 1 < sizeof unit / sizeof unit[0]) {
        bytes /= 1024;
        i++;
    }
    snprintf(out, 16, "%.*f %s", i ? 1 : 0, bytes < 0 ? 0.0 : bytes > 99999 ? 99999.0 : bytes, unit[i]);
}
