/* SPDX-License-Identifier: Apache-2.0
 *
 * From a checkpoint's names, shapes and config to a plan: which family it is, what is held, and where each piece lies.
 * Sizes come from the tensors, by majority, so that one odd tensor is the one that is named; the config is compared after.
 */
#include "engine/plan.h"
#include "engine/config.h"
#include "engine/path.h"
#include "engine/selection.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct item {
    struct family_tensor t;
    size_t index; /* in the checkpoint */
    const struct safetensors_file *file;
    const struct safetensors_tensor *tensor; /* NULL: not wanted, or at fault */
};

struct planner {
    const struct engine_options *options;
    struct faults *faults;
    struct model *model;
    struct plan *plan;
    struct model_config config;
    const struct family *family; /* NULL: unknown */
    struct item *item; /* of held layers, sorted by layer, expert, role */
    size_t items;
    int32_t *layer; /* held */
    int32_t layers;
    int64_t layer_end; /* 1 + the largest with experts */
    struct selection keep_layers, keep_experts;
    int64_t experts, hidden, inter;
    bool go_on; /* false: the first fault ended the work */
};

/* Adds a fault of the checkpoint, or of a file in it; p->go_on is false when the work must stop. */
static void add_fault(struct planner *p, const char *file, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void add_fault(struct planner *p, const char *file, const char *format, ...)
{
    char text[sizeof p->faults->first.message];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    p->go_on = faults_add(p->faults, ENGINE_BAD_CHECKPOINT, "%s: %s", path_show(p->options->model, file).s, text) && p->go_on;
}
#define FAULT(p, ...) add_fault((p), NULL, __VA_ARGS__)
#define CONFIG_FAULT(p, ...) add_fault((p), CONFIG_FILE, __VA_ARGS__)

static enum engine_code out_of_memory(struct planner *p)
{
    faults_add(p->faults, ENGINE_OUT_OF_MEMORY, "out of memory while planning the model");
    p->go_on = false;
    return ENGINE_OUT_OF_MEMORY;
}

static const char *item_name(const struct planner *p, const struct item *i)
{
    return checkpoint_tensor_name(p->plan->checkpoint, i->index);
}

static int compare_items(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    if (x->t.layer != y->t.layer)
        return x->t.layer < y->t.layer ? -1 : 1;
    if (x->t.expert != y->t.expert)
        return x->t.expert < y->t.expert ? -1 : 1;
    if (x->t.role != y->t.role)
        return x->t.role < y->t.role ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* ---- names ------------------------------------------------------------------------------------------------- */

static void collect_items(struct planner *p)
{
    struct checkpoint *c = p->plan->checkpoint;
    p->item = calloc(checkpoint_count(c) + 1, sizeof *p->item);
    if (!p->item) {
        out_of_memory(p);
        return;
    }
    for (size_t i = 0; i < checkpoint_count(c); i++)
        if (family_parse_tensor(checkpoint_tensor_name(c, i), &p->item[p->items].t))
            p->item[p->items++].index = i;
    qsort(p->item, p->items, sizeof *p->item, compare_items);
    if (!p->items) {
        FAULT(p, "no tensor of a routed expert was found among %zu (names like model.layers.0.mlp.experts.0.gate_proj.weight)",
              checkpoint_count(c));
        p->go_on = false; /* no layers either, and no sizes */
    }
}

/* The layers that are held: those with experts below num_hidden_layers, or the ones --layers names. */
static void select_layers(struct planner *p)
{
    int64_t limit = p->config.layers.key ? p->config.layers.value : INT64_MAX;
    p->layer = calloc(p->items + 1, sizeof *p->layer);
    if (!p->layer) {
        out_of_memory(p);
        return;
    }
    bool hit[SELECTION_MAX_RANGES] = {false};
    size_t kept = 0;
    for (size_t i = 0; i < p->items; i++) {
        int64_t layer = p->item[i].t.layer;
        p->layer_end = layer + 1;
        for (int32_t r = 0; r < p->keep_layers.ranges; r++)
            hit[r] |= layer >= p->keep_layers.range[r].first && layer <= p->keep_layers.range[r].last;
        if (!selection_has(&p->keep_layers, layer) || (p->keep_layers.all && layer >= limit))
            continue;
        if (!p->layers || p->layer[p->layers - 1] != layer)
            p->layer[p->layers++] = (int32_t)layer;
        p->item[kept++] = p->item[i];
    }
    p->items = kept;
    for (int32_t r = 0; r < p->keep_layers.ranges && p->go_on; r++) {
        int32_t first = p->keep_layers.range[r].first, last = p->keep_layers.range[r].last;
        if (!hit[r] || last >= p->layer_end)
            p->go_on =
                faults_add(p->faults, ENGINE_BAD_OPTION, "--layers: %s %d of the checkpoint, whose last layer with experts is %" PRId64,
                           hit[r] ? "there is no layer" : "there are no experts in layer", hit[r] ? last : first, p->layer_end - 1);
    }
    if (!p->layers && p->keep_layers.all && p->go_on)
        FAULT(p, "no layer below num_hidden_layers %" PRId64 " has experts", limit);
    p->go_on = p->go_on && p->layers; /* without any, all that could still be said would be of this */
}

static enum engine_code check_held_experts(const struct selection *held, int64_t experts, struct engine_error *error)
{
    for (int32_t r = 0; r < held->ranges; r++)
        if (held->range[r].last >= experts)
            return engine_fail(error, ENGINE_BAD_OPTION, "--experts: there is no expert %d; the model has 0 to %" PRId64,
                               held->range[r].last, experts - 1);
    return ENGINE_OK;
}

/* What --experts names, as far as the config tells; the tensors have the last word, and must agree with it. */
static void check_experts(struct planner *p)
{
    struct engine_error e;
    if (!p->config.experts.key || !check_held_experts(&p->keep_experts, p->config.experts.value, &e))
        return;
    faults_add_error(p->faults, &e);
    p->go_on = false;
}

/* Doubled, unintelligible and quantised names among the held layers; more than one form in a layer. */
static void check_names(struct planner *p)
{
    for (size_t i = 0; i < p->items && p->go_on; i++) {
        const struct item *x = &p->item[i], *y = i ? x - 1 : NULL;
        if (x->t.role == FAMILY_QUANTISED) {
            FAULT(p, "tensor \"%.200s\" belongs to a quantised checkpoint, a form that is not served", item_name(p, x));
            p->go_on = false; /* all the others would say the same */
        } else if (x->t.role == FAMILY_UNKNOWN)
            FAULT(p, "tensor \"%.200s\" is on a routed expert's path, but of no kind we know", item_name(p, x));
        else if (y && y->t.layer == x->t.layer && y->t.expert == x->t.expert && y->t.role == x->t.role)
            FAULT(p, "tensors \"%.180s\" and \"%.180s\" are the same part of the same layer", item_name(p, y), item_name(p, x));
        else if (y && y->t.layer == x->t.layer && y->t.expert < 0 && x->t.expert >= 0)
            FAULT(p, "layer %" PRId64 " has both fused experts (\"%.150s\") and separate ones (\"%.150s\")", x->t.layer, item_name(p, y),
                  item_name(p, x));
    }
}

/* ---- family and config ------------------------------------------------------------------------------------- */

static enum engine_code find_family(const char *name, const struct family **out, struct engine_error *error)
{
    *out = family_find(name);
    if (*out)
        return ENGINE_OK;
    char list[400] = "";
    for (size_t i = 0; family_name(i); i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", family_name(i));
    return engine_fail(error, ENGINE_BAD_OPTION, "--family: \"%.40s\" is none of %s", name, list);
}

static void choose_family(struct planner *p)
{
    const struct model_config *c = &p->config;
    const char *name = p->options->family;
    if (name) {
        struct engine_error e;
        if (find_family(name, &p->family, &e))
            p->go_on = faults_add_error(p->faults, &e) && p->go_on;
    } else {
        p->family = family_find(c->model_type);
        if (!p->family)
            p->family = family_find(c->text_type);
        name = c->model_type[0] ? c->model_type : c->text_type[0] ? c->text_type : "unknown";
    }
    snprintf(p->model->family, sizeof p->model->family, "%s", name);
    if (c->quantization[0]) {
        CONFIG_FAULT(p, "quantization_config: the checkpoint is quantised by %.60s, a form that is not served", c->quantization);
        p->go_on = false;
    }
}

static void choose_activation(struct planner *p)
{
    const struct model_config *c = &p->config;
    enum kernel_activation act = KERNEL_ACT_SILU;
    if (c->activation[0] && !family_parse_activation(c->activation, &act) && p->go_on)
        CONFIG_FAULT(p, "hidden_act \"%.60s\" is none of silu, gelu, gelu_tanh and their synonyms", c->activation);
    if (p->family && p->family->gpt_oss) {
        if (act != KERNEL_ACT_SILU && act != KERNEL_ACT_GPT_OSS && p->go_on)
            CONFIG_FAULT(p, "hidden_act \"%.60s\" is not that of %s", c->activation, p->family->name);
        if (c->has_swiglu_limit && c->swiglu_limit != 7.0 && p->go_on)
            CONFIG_FAULT(p, "swiglu_limit %g is not the 7 that %s has", c->swiglu_limit, p->family->name);
        act = KERNEL_ACT_GPT_OSS;
    } else if (c->has_swiglu_limit && c->swiglu_limit != 0 && p->go_on)
        CONFIG_FAULT(p, "swiglu_limit %g: an activation with a limit is known for gpt_oss alone", c->swiglu_limit);
    p->model->activation = act;
}

static void compare_value(struct planner *p, struct config_value v, int64_t found, const char *what)
{
    if (v.key && v.value != found && p->go_on)
        CONFIG_FAULT(p, "it says %s %" PRId64 ", but the tensors have %s %" PRId64, v.key, v.value, what, found);
}

static void compare_config(struct planner *p)
{
    const struct model_config *c = &p->config;
    compare_value(p, c->experts, p->experts, "experts");
    compare_value(p, c->hidden, p->hidden, "hidden size");
    if (c->moe_inter.key)
        compare_value(p, c->moe_inter, p->inter, "intermediate size");
    else if (p->family) /* an unknown family may keep the experts' size under a key of its own */
        compare_value(p, c->inter, p->inter, "intermediate size");
    int64_t k = c->top_k.key ? c->top_k.value : p->family ? p->family->top_k : 0;
    if ((k < 0 || k > p->experts || (c->top_k.key && !k)) && p->go_on)
        CONFIG_FAULT(p, "%s %" PRId64 " is not within the %" PRId64 " experts", c->top_k.key ? c->top_k.key : "top-k", k, p->experts);
    p->model->top_k = (int32_t)k;
}

/* ---- shapes ------------------------------------------------------------------------------------------------ */

/* Finds the tensors that are wanted, opening their files. */
static void resolve_items(struct planner *p)
{
    for (size_t i = 0; i < p->items && p->go_on; i++) {
        struct item *x = &p->item[i];
        if (x->t.role >= FAMILY_QUANTISED || (x->t.expert >= 0 && !selection_has(&p->keep_experts, x->t.expert)))
            continue;
        int64_t before = p->faults->count;
        checkpoint_resolve(p->plan->checkpoint, x->index, &x->file, &x->tensor, p->faults);
        if (p->faults->count != before && !p->faults->report)
            p->go_on = false;
    }
}

/* Majority vote (Boyer and Moore's) over a pair of sizes. */
struct vote {
    int64_t a, b, lead;
};

static void vote_cast(struct vote *v, int64_t a, int64_t b)
{
    if (v->lead && (v->a != a || v->b != b))
        v->lead--;
    else {
        v->a = a;
        v->b = b;
        v->lead++;
    }
}

/* The fused pair of the layer that begins at item i; either may be NULL. */
static void find_pair(const struct planner *p, size_t i, const struct item **gate_up, const struct item **down)
{
    *gate_up = *down = NULL;
    int64_t layer = p->item[i].t.layer;
    for (; i < p->items && p->item[i].t.layer == layer && p->item[i].t.expert < 0; i++) {
        if (p->item[i].t.role == FAMILY_FUSED_GATE_UP)
            *gate_up = &p->item[i];
        if (p->item[i].t.role == FAMILY_FUSED_DOWN)
            *down = &p->item[i];
    }
}

enum orientation { UNFIT, STRAIGHT, TRANSPOSED };

/* gate_up [E, 2I, H] with down [E, H, I], or [E, H, 2I] with [E, I, H]; no pair of shapes can be both. */
static enum orientation pair_orientation(const struct item *gate_up, const struct item *down, int64_t *hidden, int64_t *inter)
{
    if (!gate_up || !down || !gate_up->tensor || !down->tensor || gate_up->tensor->rank != 3 || down->tensor->rank != 3)
        return UNFIT;
    const int64_t *g = gate_up->tensor->shape, *d = down->tensor->shape;
    if (g[2] == d[1] && d[2] <= INT32_MAX && g[1] == 2 * d[2]) {
        *hidden = g[2];
        *inter = d[2];
        return STRAIGHT;
    }
    if (g[1] == d[2] && d[1] <= INT32_MAX && g[2] == 2 * d[1]) {
        *hidden = g[1];
        *inter = d[1];
        return TRANSPOSED;
    }
    return UNFIT;
}

static void find_sizes(struct planner *p)
{
    struct vote sizes = {0}, experts = {0};
    struct engine_error e;
    int64_t largest = -1;
    for (size_t i = 0; i < p->items; i++) {
        const struct item *x = &p->item[i], *gate_up, *down;
        if (x->t.expert > largest)
            largest = x->t.expert;
        if (x->t.expert < 0 && (!i || x[-1].t.layer != x->t.layer)) {
            int64_t h, m;
            find_pair(p, i, &gate_up, &down);
            if (pair_orientation(gate_up, down, &h, &m) != UNFIT)
                vote_cast(&sizes, m, h);
            for (int k = 0; k < 2; k++) {
                const struct item *y = k ? down : gate_up;
                if (y && y->tensor && y->tensor->rank == 3)
                    vote_cast(&experts, y->tensor->shape[0], 0);
            }
        }
        if (x->t.expert >= 0 && x->tensor && x->tensor->rank == 2)
            vote_cast(&sizes, x->tensor->shape[x->t.role == FAMILY_DOWN], x->tensor->shape[x->t.role != FAMILY_DOWN]);
    }
    p->inter = sizes.a;
    p->hidden = sizes.b;
    p->experts = largest >= 0 ? largest + 1 : experts.a;
    if (!p->go_on)
        return;
    if (p->experts < 1 || p->experts > KERNEL_MAX_EXPERTS)
        FAULT(p, "the tensors tell of %" PRId64 " experts; 1 to %d can be served", p->experts, KERNEL_MAX_EXPERTS);
    else if (check_held_experts(&p->keep_experts, p->experts, &e))
        faults_add_error(p->faults, &e);
    else if (!sizes.lead)
        FAULT(p, "the shapes of the experts' tensors fit no layout we know (the first is \"%.200s\")", item_name(p, &p->item[0]));
    else if (p->inter < 1 || p->inter > KERNEL_MAX_WIDTH || p->hidden < 1 || p->hidden > KERNEL_MAX_WIDTH)
        FAULT(p, "hidden size %" PRId64 " or intermediate size %" PRId64 " is out of range (1 to %d)", p->hidden, p->inter,
              KERNEL_MAX_WIDTH);
    else
        return;
    p->go_on = false; /* nothing to compare the rest with */
}

static void shape_text(char *out, size_t size, int rank, const int64_t *shape)
{
    size_t n = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < rank; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%" PRId64, i ? ", " : "", shape[i]);
    snprintf(out + n, size - n, "]");
}

/* Makes `x` the source if its shape and type are right. */
static void place(struct planner *p, const struct item *x, int rank, const int64_t *shape, struct plan_source *out)
{
    const struct safetensors_tensor *t = x->tensor;
    if (!p->go_on || !t)
        return;
    enum dtype dtype;
    if (!safetensors_dtype_float(t->dtype, &dtype)) {
        FAULT(p, "tensor \"%.200s\" has dtype %s%s; BF16, F16 and F32 are served", item_name(p, x), safetensors_dtype_name(t->dtype),
              safetensors_dtype_bits(t->dtype) <= 8 || t->dtype == ST_I32 ? ", so it is of a quantised checkpoint" : "");
        return;
    }
    if (t->rank != rank || memcmp(t->shape, shape, (size_t)rank * sizeof *shape)) {
        char found[200], expected[100];
        shape_text(found, sizeof found, t->rank, t->shape);
        shape_text(expected, sizeof expected, rank, shape);
        FAULT(p, "tensor \"%.200s\" has shape %s, expected %s", item_name(p, x), found, expected);
        return;
    }
    out->file = x->file;
    out->tensor = t;
    out->file_index = checkpoint_file_index(p->plan->checkpoint, x->index);
    out->dtype = dtype;
    p->model->tensors++;
}

/* The name that the missing tensor would have, after the manner of one that is there. */
static void missing_name(const struct planner *p, const struct item *like, int64_t expert, enum family_role role, char *out, size_t size)
{
    static const char *const proj[] = {"gate_proj", "up_proj",           "down_proj",     "gate_up_proj",
                                       "down_proj", "gate_up_proj_bias", "down_proj_bias"};
    static const char *const mixtral[] = {"w1", "w3", "w2"}, *const granite[] = {"input_linear.weight", "output_linear.weight"};
    const char *name = item_name(p, like), *experts = strstr(name, "experts.");
    if (!experts)
        snprintf(out, size, "%.*s%s", (int)(strstr(name, "put_linear") - name) - (like->t.role == FAMILY_FUSED_DOWN ? 3 : 2), name,
                 granite[role == FAMILY_FUSED_DOWN]);
    else if (expert < 0)
        snprintf(out, size, "%.*sexperts.%s", (int)(experts - name), name, proj[role]);
    else
        snprintf(out, size, "%.*sexperts.%" PRId64 ".%s.weight", (int)(experts - name), name, expert,
                 strstr(experts, "_proj") ? proj[role] : mixtral[role]);
}

static void fault_missing(struct planner *p, const struct item *like, int64_t expert, enum family_role role)
{
    char name[300];
    missing_name(p, like, expert, role, name, sizeof name);
    FAULT(p, "tensor \"%.250s\" is missing", name);
}

static void place_fused(struct planner *p, size_t i, struct plan_layer *out)
{
    const struct item *gate_up, *down, *bias[2] = {NULL, NULL}, *first = &p->item[i];
    int64_t h = p->hidden, m = p->inter, unused;
    find_pair(p, i, &gate_up, &down);
    for (size_t k = i; k < p->items && p->item[k].t.layer == first->t.layer; k++)
        if (p->item[k].t.role == FAMILY_FUSED_GATE_UP_BIAS || p->item[k].t.role == FAMILY_FUSED_DOWN_BIAS)
            bias[p->item[k].t.role == FAMILY_FUSED_DOWN_BIAS] = &p->item[k];
    if (!gate_up)
        fault_missing(p, first, -1, FAMILY_FUSED_GATE_UP);
    if (!down && p->go_on)
        fault_missing(p, first, -1, FAMILY_FUSED_DOWN);
    if (!gate_up || !down || !p->go_on)
        return;

    enum orientation found = pair_orientation(gate_up, down, &unused, &unused);
    const struct family *f = p->family;
    bool transposed = f && f->transposed;
    if (found == TRANSPOSED && !transposed) {
        if (!f || !f->may_be_transposed) {
            char shape[200];
            shape_text(shape, sizeof shape, 3, gate_up->tensor->shape);
            FAULT(p,
                  "tensor \"%.150s\" %s is transposed, [experts, hidden, 2 * intermediate], and for model_type \"%.50s\" the order of gate "
                  "and up "
                  "in it is not known: name the family that it is like with --family",
                  item_name(p, gate_up), shape, p->model->family);
            return;
        }
        transposed = true;
    }
    out->fused = true;
    out->transposed = transposed;
    place(p, gate_up, 3, transposed ? (int64_t[]){p->experts, h, 2 * m} : (int64_t[]){p->experts, 2 * m, h}, &out->source[PLAN_GATE_UP]);
    place(p, down, 3, transposed ? (int64_t[]){p->experts, m, h} : (int64_t[]){p->experts, h, m}, &out->source[PLAN_DOWN]);
    for (int b = 0; b < 2 && p->go_on; b++)
        if (bias[b])
            place(p, bias[b], 2, (int64_t[]){p->experts, b ? h : 2 * m}, &out->source[PLAN_GATE_UP_BIAS + b]);
        else if (bias[!b] || (f && f->biases))
            fault_missing(p, gate_up, -1, b ? FAMILY_FUSED_DOWN_BIAS : FAMILY_FUSED_GATE_UP_BIAS);
}

static void place_separate(struct planner *p, size_t i, struct plan_layer *out)
{
    const struct item *first = &p->item[i];
    const struct model *m = p->model;
    if (p->family && p->family->biases) {
        FAULT(p, "tensor \"%.200s\": %s has fused experts with biases, not separate ones", item_name(p, first), p->family->name);
        return;
    }
    for (int32_t e = 0; e < m->dims.experts && p->go_on; e++) {
        const struct item *part[KERNEL_PROJECTIONS] = {NULL};
        for (; i < p->items && p->item[i].t.layer == first->t.layer && p->item[i].t.expert <= m->held_experts[e]; i++)
            if (p->item[i].t.expert == m->held_experts[e] && p->item[i].t.role <= FAMILY_DOWN)
                part[p->item[i].t.role] = &p->item[i];
        for (int r = FAMILY_GATE; r <= FAMILY_DOWN && p->go_on; r++)
            if (part[r])
                place(p, part[r], 2, r == FAMILY_DOWN ? (int64_t[]){p->hidden, p->inter} : (int64_t[]){p->inter, p->hidden},
                      &out->source[e * KERNEL_PROJECTIONS + r]);
            else
                fault_missing(p, first, m->held_experts[e], (enum family_role)r);
    }
}

static void place_layers(struct planner *p)
{
    size_t i = 0;
    for (int32_t l = 0; l < p->layers && p->go_on; l++) {
        struct plan_layer *out = &p->plan->layer[l];
        while (p->item[i].t.layer != p->layer[l])
            i++;
        bool fused = p->item[i].t.expert < 0;
        out->source = calloc(fused ? PLAN_FUSED : (size_t)p->model->dims.experts * KERNEL_PROJECTIONS, sizeof *out->source);
        if (!out->source)
            out_of_memory(p);
        else if (fused)
            place_fused(p, i, out);
        else
            place_separate(p, i, out);
    }
}

/* ---- the whole --------------------------------------------------------------------------------------------- */

enum engine_code plan_choose_dtype(const char *name, bool float16_files, enum dtype *out, struct engine_error *error)
{
    *out = float16_files ? DTYPE_FP16 : DTYPE_BF16;
    if (name && !strcmp(name, "bf16"))
        *out = DTYPE_BF16;
    else if (name && !strcmp(name, "fp16"))
        *out = DTYPE_FP16;
    else if (name && strcmp(name, "auto"))
        return engine_fail(error, ENGINE_BAD_OPTION, "--dtype: \"%.40s\" is neither bf16 nor fp16", name);
    return ENGINE_OK;
}

static bool all_float16(const struct plan *plan, int32_t held)
{
    for (int32_t l = 0; l < plan->layers; l++) {
        int32_t n = plan->layer[l].fused ? PLAN_DOWN + 1 : held * KERNEL_PROJECTIONS;
        for (int32_t s = 0; s < n; s++)
            if (plan->layer[l].source[s].dtype != DTYPE_FP16)
                return false;
    }
    return true;
}

static void take_steps(struct planner *p, void (*const *step)(struct planner *), size_t steps)
{
    for (size_t i = 0; i < steps && p->go_on; i++)
        step[i](p);
}

/* What the options, the config and the tensors' names tell, before a shard is opened. */
static void plan_names(struct planner *p)
{
    static void (*const step[])(struct planner *) = {choose_family, choose_activation, check_experts,
                                                     collect_items, select_layers,     check_names};
    struct engine_error e;
    if (selection_parse(p->options->layers, "--layers", &p->keep_layers, &e) ||
        selection_parse(p->options->experts, "--experts", &p->keep_experts, &e) ||
        checkpoint_open(p->options->model, &p->plan->checkpoint, &e) ||
        config_read(checkpoint_dir_fd(p->plan->checkpoint), p->options->model, &p->config, &e)) {
        faults_add_error(p->faults, &e);
        p->go_on = false;
    }
    take_steps(p, step, sizeof step / sizeof step[0]);
}

static void plan_tensors(struct planner *p)
{
    static void (*const step[])(struct planner *) = {plan_names, resolve_items, find_sizes};
    struct engine_error e;
    struct model *m = p->model;
    take_steps(p, step, sizeof step / sizeof step[0]);
    if (!p->go_on)
        return;
    if (plan_hold(m, p->plan, p->layer, p->layers, (int32_t)p->experts, &p->keep_experts, &e)) {
        faults_add_error(p->faults, &e);
        return;
    }
    compare_config(p);
    place_layers(p);
    m->checkpoint_layers = p->layer_end;
    m->dims.hidden = (int32_t)p->hidden;
    m->dims.inter = (int32_t)p->inter;
    m->weight_on_input = p->family && p->family->weight_on_input;
    m->fused = p->family ? p->family->fused : MODEL_FUSED_HALVES;
    m->transposed = p->family && p->family->transposed;
    m->ignored = (int64_t)checkpoint_count(p->plan->checkpoint) - m->tensors;
    if (p->go_on && !p->faults->count && plan_choose_dtype(p->options->dtype, all_float16(p->plan, m->dims.experts), &m->dims.op, &e))
        faults_add_error(p->faults, &e);
}

static void plan_checkpoint(const struct engine_options *options, void (*step)(struct planner *p), struct faults *faults,
                            struct model *model, struct plan *plan)
{
    struct planner p = {.options = options, .faults = faults, .model = model, .plan = plan, .go_on = true};
    step(&p);
    free(p.item);
    free(p.layer);
}

enum engine_code plan_read(const struct kernel_table *kernels, const struct engine_options *options, struct faults *faults,
                           struct model *model, struct plan *plan)
{
    struct engine_error e;
    if (options->synthetic) {
        if (synthetic_plan(options, model, plan, &e))
            faults_add_error(faults, &e);
    } else if (!options->model) {
        faults_add(faults, ENGINE_BAD_OPTION, "neither --model nor --synthetic is given");
    } else {
        plan_checkpoint(options, plan_tensors, faults, model, plan);
    }
    if (faults->count)
        return faults->first.code;
    kernels->dims_init(&model->dims);
    for (int32_t l = 0; l < model->layers; l++) {
        model->layer[l].weights.activation = model->activation;
        model->layer[l].weights.weight_on_input = model->weight_on_input;
    }
    return ENGINE_OK;
}

enum engine_code plan_check_options(const struct engine_options *o, struct engine_error *error)
{
    struct faults faults = {0};
    struct plan plan = {0};
    struct engine_error e;
    enum dtype dtype;
    struct model *model = calloc(1, sizeof *model);
    if (!model)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for a model");
    if (o->synthetic ? synthetic_plan(o, model, &plan, &e) : plan_choose_dtype(o->dtype, false, &dtype, &e))
        faults_add_error(&faults, &e);
    else if (!o->synthetic)
        plan_checkpoint(o, plan_names, &faults, model, &plan);
    plan_finish(&plan);
    model_destroy(model);
    return faults_finish(&faults, error);
}

enum engine_code plan_hold(struct model *model, struct plan *plan, const int32_t *layers, int32_t layer_count, int32_t experts,
                           const struct selection *held, struct engine_error *error)
{
    enum engine_code code = check_held_experts(held, experts, error);
    if (code)
        return code;
    model->layer = calloc((size_t)layer_count, sizeof *model->layer);
    model->held_layers = calloc((size_t)layer_count, sizeof *model->held_layers);
    model->held_experts = calloc((size_t)experts, sizeof *model->held_experts);
    model->local_expert = calloc((size_t)experts, sizeof *model->local_expert);
    plan->layer = calloc((size_t)layer_count, sizeof *plan->layer);
    if (!model->layer || !model->held_layers || !model->held_experts || !model->local_expert || !plan->layer)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the description of %d layers", layer_count);
    model->layers = plan->layers = layer_count;
    for (int32_t l = 0; l < layer_count; l++)
        model->layer[l].layer = model->held_layers[l] = layers[l];
    model->experts = experts;
    for (int32_t e = 0; e < experts; e++) {
        model->local_expert[e] = -1;
        if (!selection_has(held, e))
            continue;
        model->local_expert[e] = model->dims.experts;
        model->held_experts[model->dims.experts++] = e;
    }
    return ENGINE_OK;
}

void plan_finish(struct plan *plan)
{
    for (int32_t l = 0; plan->layer && l < plan->layers; l++)
        free(plan->layer[l].source);
    free(plan->layer);
    checkpoint_close(plan->checkpoint);
}
