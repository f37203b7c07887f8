/* SPDX-License-Identifier: Apache-2.0
 *
 * Options: the table, the command line, the config file, their order of precedence, and the sample file in deploy/.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "server/options.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char message[1024];

/* Arguments up to a NULL. */
static bool parse(struct options *o, ...)
{
    char *argv[160] = {"expertd"};
    int argc = 1;
    va_list args;
    va_start(args, o);
    while ((argv[argc] = va_arg(args, char *)))
        argc++;
    va_end(args);
    message[0] = '\0';
    return options_parse(o, argc, argv, message, sizeof message);
}

#define assert_refused(sentence, ...)                                                                                                      \
    do {                                                                                                                                   \
        struct options refused;                                                                                                            \
        assert_false(parse(&refused, __VA_ARGS__, NULL));                                                                                  \
        if (!strstr(message, sentence))                                                                                                    \
            fail_msg("'%s' does not say '%s'", message, sentence);                                                                         \
    } while (0)

static void the_table_is_alphabetical_and_complete(void **state)
{
    static const char *const promised[] = {"adapter",
                                           "adapter-root",
                                           "admin-key-file",
                                           "api-key-file",
                                           "batch-wait-us",
                                           "check",
                                           "config",
                                           "device",
                                           "drain-timeout-s",
                                           "dtype",
                                           "experts",
                                           "family",
                                           "help",
                                           "layers",
                                           "listen",
                                           "log-format",
                                           "log-level",
                                           "max-adapter-bytes",
                                           "max-adapters",
                                           "max-batch-rows",
                                           "max-body-bytes",
                                           "max-connections",
                                           "max-inflight-bytes",
                                           "metrics-open",
                                           "model",
                                           "model-name",
                                           "queue-rows",
                                           "request-timeout-s",
                                           "spool-dir",
                                           "synthetic",
                                           "threads",
                                           "version"};
    (void)state;
    size_t n = sizeof promised / sizeof promised[0];
    for (size_t i = 0; i < n; i++)
        assert_string_equal(options_table[i].name, promised[i]);
    assert_null(options_table[n].name);
}

static void defaults_are_those_of_the_table(void **state)
{
    struct options o;
    (void)state;
    assert_true(parse(&o, "--model", "m", NULL));
    assert_int_equal(o.listen.count, 1);
    assert_string_equal(o.listen.item[0], "127.0.0.1:8080");
    assert_string_equal(o.device, "auto");
    assert_string_equal(o.log_format, "text");
    assert_int_equal(o.max_inflight_bytes, INT64_C(1) << 30);
    assert_int_equal(o.queue_rows, 65536);
    assert_int_equal(o.adapter.count, 0);
    assert_null(o.model_name);
    assert_null(o.dtype);
    assert_false(o.metrics_open);
    options_finish(&o);
    options_finish(&o); /* twice is harmless */
}

static void both_forms_and_every_kind(void **state)
{
    struct options o;
    (void)state;
    assert_true(parse(&o, "--model=/m=1", "--threads", "3", "--max-body-bytes=64k", "--max-adapter-bytes", "3T", "--metrics-open",
                      "--adapter", "a=/x", "--adapter=b=/y=z", "--device", "cuda:12", NULL));
    assert_string_equal(o.model, "/m=1");
    assert_int_equal(o.threads, 3);
    assert_int_equal(o.max_body_bytes, 65536);
    assert_int_equal(o.max_adapter_bytes, INT64_C(3) << 40);
    assert_true(o.metrics_open);
    assert_int_equal(o.adapter.count, 2);
    assert_string_equal(o.adapter.item[1], "b=/y=z");
    assert_string_equal(o.device, "cuda:12");
    options_finish(&o);
    assert_true(parse(&o, "--model", "a", "--model", "--b", "--metrics-open", "--metrics-open=false", NULL));
    assert_string_equal(o.model, "--b"); /* the last wins; a value may look like an option */
    assert_false(o.metrics_open);
    options_finish(&o);
}

static void a_number_may_be_a_word(void **state)
{
    struct options o;
    (void)state;
    assert_true(parse(&o, "--model", "m", NULL));
    assert_int_equal(o.batch_wait_us, 0);
    options_finish(&o);
    assert_true(parse(&o, "--model", "m", "--batch-wait-us", "auto", NULL));
    assert_int_equal(o.batch_wait_us, OPTIONS_WORD);
    options_finish(&o);
    assert_true(parse(&o, "--model", "m", "--batch-wait-us", "auto", "--batch-wait-us=50", NULL));
    assert_int_equal(o.batch_wait_us, 50);
    options_finish(&o);
}

static void a_list_replaces_the_default(void **state)
{
    struct options o;
    (void)state;
    assert_true(parse(&o, "--model", "m", "--listen", "0.0.0.0:0", "--listen", "unix:/s", NULL));
    assert_int_equal(o.listen.count, 2);
    assert_string_equal(o.listen.item[0], "0.0.0.0:0");
    options_finish(&o);
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    assert_refused("did you mean --threads?", "--thread", "3");
    assert_refused("did you mean --max-adapter-bytes?", "--max-adapters-bytes=3");
    assert_refused("unknown option --zzzzzzzzzzzz (see --help)", "--zzzzzzzzzzzz");
    assert_refused("'serve' is not an option", "serve");
    assert_refused("'-m' is not an option", "-m", "x");
    assert_refused("--model needs a value (DIR)", "--model");
    assert_refused("--model needs a value that is not empty", "--model=");
    assert_refused("--threads takes a whole number", "--model", "m", "--threads", "many");
    assert_refused("--threads takes a whole number", "--model", "m", "--threads", "-1");
    assert_refused("--threads takes a whole number", "--model", "m", "--threads", " 1");
    assert_refused("--threads takes a whole number", "--model", "m", "--threads", "1K");
    assert_refused("--threads must lie between 0 and 4096, and '4097' does not", "--model", "m", "--threads", "4097");
    assert_refused("--max-body-bytes must lie between", "--model", "m", "--max-body-bytes", "99999999999999999999");
    assert_refused("--max-body-bytes must lie between", "--model", "m", "--max-body-bytes", "9999999999999T");
    assert_refused("--threads takes a whole number", "--model", "m", "--threads", "auto");
    assert_refused("--batch-wait-us takes a whole number or auto", "--model", "m", "--batch-wait-us", "automatic");
    assert_refused("--batch-wait-us takes a whole number or auto", "--model", "m", "--batch-wait-us", "-1");
    assert_refused("such as 4096, 64K, 256M or 8G", "--model", "m", "--max-body-bytes", "1 G");
    assert_refused("such as 4096, 64K, 256M or 8G", "--model", "m", "--max-body-bytes", "1GB");
    assert_refused("--log-level takes one of debug|info|warning|error, not 'warn'", "--model", "m", "--log-level", "warn");
    assert_refused("--device takes one of", "--model", "m", "--device", "cuda:");
    assert_refused("--device takes one of", "--model", "m", "--device", "cuda:1x");
    assert_refused("--device takes one of", "--model", "m", "--device", "gpu");
    assert_refused("--adapter takes NAME=PATH, not 'name'", "--model", "m", "--adapter", "name");
    assert_refused("--adapter takes NAME=PATH, not '=path'", "--model", "m", "--adapter", "=path");
    assert_refused("--metrics-open takes true or false, not 'yes'", "--model", "m", "--metrics-open=yes");
}

static void options_are_checked_together(void **state)
{
    struct options o;
    (void)state;
    assert_refused("--model DIR or --synthetic SHAPE is needed", "--threads", "2");
    assert_refused("--model and --synthetic exclude each other", "--model", "m", "--synthetic", "E=1");
    assert_refused("--check and --synthetic exclude each other", "--check", "m", "--synthetic", "E=1");
    assert_refused("not for --synthetic", "--layers", "0", "--synthetic", "E=1");
    assert_refused("--adapter a=d: --adapter a=b has the same name", "--model", "m", "--adapter", "a=b", "--adapter", "ab=c", "--adapter",
                   "a=d");
    assert_refused("--adapter is given 2 times, and --max-adapters is 1", "--model", "m", "--max-adapters", "1", "--adapter", "a=b",
                   "--adapter", "c=d");
    assert_true(parse(&o, "--check", "dir", NULL));
    options_finish(&o);
    assert_true(parse(&o, "--check", "adapter", "--model", "m", NULL));
    options_finish(&o);
    assert_true(parse(&o, "--help", NULL));
    assert_true(o.help);
    options_finish(&o);
    assert_true(parse(&o, "-h", NULL));
    assert_true(o.help && !o.version);
    options_finish(&o);
    assert_true(parse(&o, "--model", "m", "-v", NULL));
    assert_true(o.version && !o.help);
    options_finish(&o);
    assert_refused("'-m' is not an option", "-m"); /* --metrics-open is a flag, but none that prints something and exits */
    assert_refused("'-hv' is not an option", "-hv");
    assert_true(parse(&o, "--version", "--config", "/nonexistent", NULL));
    assert_true(o.version);
    options_finish(&o);
}

static void a_list_has_a_limit(void **state)
{
    char *argv[2 * OPTIONS_MAX_LIST + 5] = {"expertd", "--model", "m"};
    int argc = 3;
    struct options o;
    (void)state;
    for (int i = 0; i <= OPTIONS_MAX_LIST; i++) {
        argv[argc++] = "--listen=x:1";
    }
    assert_false(options_parse(&o, argc, argv, message, sizeof message));
    assert_non_null(strstr(message, "--listen may be given at most 64 times"));
}

/* ---- the config file ------------------------------------------------------------------------------------------ */

static char config_path[] = "/tmp/test_options.XXXXXX";

static void write_config(const char *text, size_t length)
{
    FILE *file = fopen(config_path, "we");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, length, file), length);
    assert_int_equal(fclose(file), 0);
}

static bool parse_config(struct options *o, const char *text)
{
    write_config(text, strlen(text));
    return parse(o, "--config", config_path, NULL);
}

static void assert_config_refused(const char *text, const char *sentence)
{
    struct options o;
    char expected[256];
    snprintf(expected, sizeof expected, "%s:%s", config_path, sentence);
    assert_false(parse_config(&o, text));
    if (strncmp(message, expected, strlen(expected)))
        fail_msg("'%s' does not begin with '%s'", message, expected);
}

static void a_config_file_sets_options(void **state)
{
    struct options o;
    (void)state;
    assert_true(parse_config(&o, "# comment\n\n  model = /a b#c = d \t\r\n#threads = 9\nlisten=1:1\nlisten = unix:/x\nmetrics-open = true\n"
                                 "max-body-bytes = 1M")); /* no newline at the end */
    assert_string_equal(o.model, "/a b#c = d");
    assert_int_equal(o.threads, 0);
    assert_int_equal(o.listen.count, 2);
    assert_string_equal(o.listen.item[1], "unix:/x");
    assert_true(o.metrics_open);
    assert_int_equal(o.max_body_bytes, 1048576);
    assert_string_equal(o.config, config_path);
    options_finish(&o);
}

static void the_command_line_wins(void **state)
{
    struct options o;
    static const char text[] = "model = file\nthreads = 2\nmetrics-open = true\nlisten = a:1\nlisten = b:2\nadapter = x=y\n";
    (void)state;
    write_config(text, sizeof text - 1);
    assert_true(parse(&o, "--threads", "5", "--listen", "c:3", "--metrics-open=false", "--config", config_path, NULL));
    assert_string_equal(o.model, "file");
    assert_int_equal(o.threads, 5);
    assert_int_equal(o.listen.count, 1);
    assert_string_equal(o.listen.item[0], "c:3");
    assert_false(o.metrics_open);
    assert_int_equal(o.adapter.count, 1);
    options_finish(&o);
}

static void bad_config_lines_are_named(void **state)
{
    (void)state;
    assert_config_refused("model = m\nthread = 2\n", "2: unknown option 'thread'; did you mean 'threads'?");
    assert_config_refused("model = m\n\nmodel = n\n", "3: 'model' was already set in line 1");
    assert_config_refused("model\n", "1: expected `name = value`, found 'model'");
    assert_config_refused("= m\n", "1: unknown option ''");
    assert_config_refused("model =\n", "1: 'model' needs a value that is not empty");
    assert_config_refused("model = m\nthreads = x\n", "2: 'threads' takes a whole number");
    assert_config_refused("metrics-open = 1\n", "1: 'metrics-open' takes true or false");
    assert_config_refused("config = x\n", "1: 'config' is for the command line only");
    assert_config_refused("check = x\n", "1: 'check' is for the command line only");
    write_config("model = m\0\n", 11);
    assert_refused("holds a NUL byte", "--config", config_path);
    assert_refused("/nonexistent/conf: No such file or directory", "--config", "/nonexistent/conf");
    assert_refused("/: Is a directory", "--config", "/");
}

/* ---- --help and the sample ------------------------------------------------------------------------------------ */

static char *read_all(FILE *file)
{
    char *text = calloc(1, 65536);
    assert_non_null(text);
    assert_true(fread(text, 1, 65535, file) > 0);
    return text;
}

static void help_shows_every_option_and_default(void **state)
{
    (void)state;
    FILE *file = tmpfile();
    options_print_help(file);
    rewind(file);
    char *text = read_all(file);
    fclose(file);
    for (const struct options_row *row = options_table; row->name; row++) {
        char expected[64], letter[8] = "";
        if (!strcmp(row->name, "help") || !strcmp(row->name, "version"))
            snprintf(letter, sizeof letter, ", -%c", row->name[0]);
        snprintf(expected, sizeof expected, "\n  --%s%s%s%s\n", row->name, row->value ? " " : "", row->value ? row->value : "", letter);
        const char *at = strstr(text, expected);
        if (!at) {
            fail_msg("--help lacks %s", row->name);
            break;
        }
        if (row->default_text) {
            const char *next = strstr(at + 1, "\n  --");
            const char *shown = strstr(at, "Default:");
            assert_true(shown && (!next || shown < next));
            assert_true(!strncmp(shown + 9 + strspn(shown + 8, " \n") - 1, row->default_text, strlen(row->default_text)));
        }
    }
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        assert_true(strlen(line) <= 112);
    free(text);
}

/* In the sample "#name = value" is an option commented out, "# ..." prose. Every option a file may hold appears once, and what
 * is commented out shows the table's default. */
static void the_sample_file_fits_the_table(void **state)
{
    (void)state;
    FILE *file = fopen(SAMPLE_CONFIG, "re");
    assert_non_null(file);
    char *text = read_all(file);
    fclose(file);
    int seen[64] = {0};
    char active[8192] = "";
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        bool commented = line[0] == '#';
        if (commented && (line[1] == ' ' || !line[1]))
            continue;
        line += commented;
        const struct options_row *row = options_table;
        while (row->name && (strncmp(line, row->name, strlen(row->name)) || strncmp(line + strlen(row->name), " = ", 3)))
            row++;
        if (!row->name || !row->config)
            fail_msg("not an option of config files: %s", line);
        seen[row - options_table]++;
        if (commented && row->default_text)
            assert_string_equal(line + strlen(row->name) + 3, row->default_text);
        if (commented && row->kind == OPTION_FLAG)
            assert_string_equal(line + strlen(row->name) + 3, "false");
        if (strcmp(row->name, "model") && strcmp(row->name, "family") && strcmp(row->name, "layers") && strcmp(row->name, "experts")) {
            strcat(active, line); /* all but those that synthetic excludes */
            strcat(active, "\n");
        }
    }
    free(text);
    for (const struct options_row *row = options_table; row->name; row++) {
        if (row->config && seen[row - options_table] != 1)
            fail_msg("%s appears %d times", row->name, seen[row - options_table]);
    }
    struct options o;
    assert_true(parse(&o, "--config", SAMPLE_CONFIG, NULL));
    options_finish(&o);
    if (!parse_config(&o, active))
        fail_msg("the sample with everything uncommented: %s", message);
    options_finish(&o);
}

static int make_config(void **state)
{
    (void)state;
    int fd = mkstemp(config_path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_config(void **state)
{
    (void)state;
    return unlink(config_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_is_alphabetical_and_complete),
        cmocka_unit_test(defaults_are_those_of_the_table),
        cmocka_unit_test(both_forms_and_every_kind),
        cmocka_unit_test(a_number_may_be_a_word),
        cmocka_unit_test(a_list_replaces_the_default),
        cmocka_unit_test(bad_arguments_are_named),
        cmocka_unit_test(options_are_checked_together),
        cmocka_unit_test(a_list_has_a_limit),
        cmocka_unit_test(a_config_file_sets_options),
        cmocka_unit_test(the_command_line_wins),
        cmocka_unit_test(bad_config_lines_are_named),
        cmocka_unit_test(help_shows_every_option_and_default),
        cmocka_unit_test(the_sample_file_fits_the_table),
    };
    return cmocka_run_group_tests(tests, make_config, remove_config);
}
