/* SPDX-License-Identifier: Apache-2.0
 *
 * From a file's names and shapes to pairs of A and B that fit the model. Every tensor on a routed-expert path must find its
 * place; nothing is dropped in silence.
 */
#include "engine/peft.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A tensor on a routed-expert path. */
struct item {
    const struct safetensors_tensor *tensor;
    int64_t layer;
    int32_t expert; /* -1: fused */
    int32_t slot; /* enum kernel_projection of a Linear, enum peft_fused of a fused one */
    bool b;
};

struct planner {
    const struct model *model;
    struct peft_config *config;
    struct faults *log;
    struct item *item;
    size_t items;
    struct peft_plan *plan;
    bool *ambiguous; /* [pairs] in = out */
    bool seen_normal, seen_swapped;
};

static struct peft_text shape_text(const struct safetensors_tensor *t)
{
    struct peft_text out;
    size_t n = 0;
    n += (size_t)snprintf(out.s, sizeof out.s, "[");
    for (int32_t i = 0; i < t->rank && n < sizeof out.s - 24; i++)
        n += (size_t)snprintf(out.s + n, sizeof out.s - n, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    snprintf(out.s + n, sizeof out.s - n, "]");
    return out;
}

static int compare_items(const void *pa, const void *pb)
{
    const struct item *a = pa, *b = pb;
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    if (a->expert != b->expert)
        return a->expert < b->expert ? -1 : 1;
    if (a->slot != b->slot)
        return a->slot < b->slot ? -1 : 1;
    if (a->b != b->b)
        return a->b ? 1 : -1;
    return strcmp(a->tensor->name, b->tensor->name);
}

static bool same_module(const struct item *a, const struct item *b)
{
    return a->layer == b->layer && a->expert == b->expert && a->slot == b->slot;
}

/* ---- collecting ------------------------------------------------------------------------------------------------ */

static bool check_tensor(struct planner *p, const struct safetensors_tensor *t, bool *fits)
{
    enum dtype type;
    *fits = safetensors_dtype_float(t->dtype, &type);
    if (!*fits)
        return faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" is of type %s; expected F32, F16 or BF16", PEFT_QUOTE(t->name),
                          safetensors_dtype_name(t->dtype));
    *fits = t->rank == 2;
    if (!*fits)
        return faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" has shape %s; expected two dimensions", PEFT_QUOTE(t->name),
                          shape_text(t).s);
    return true;
}

static bool collect(struct planner *p, const struct safetensors_file *file)
{
    size_t n = safetensors_count(file);
    int64_t foreign = 0;
    char adapter[PEFT_MAX_NAME + 1];
    bool have_adapter = false;
    p->item = calloc(n ? n : 1, sizeof *p->item);
    if (!p->item)
        return faults_add(p->log, ENGINE_OUT_OF_MEMORY, "out of memory for the names of %zu tensors", n);
    for (size_t i = 0; i < n; i++) {
        const struct safetensors_tensor *t = safetensors_at(file, i);
        struct peft_name name;
        peft_name_parse(t->name, &name);
        if (name.kind == PEFT_OTHER) {
            p->plan->ignored++;
            foreign += name.foreign;
            continue;
        }
        p->plan->tensors++;
        if (name.kind == PEFT_UNKNOWN) {
            if (!faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" seems to adapt routed experts but its name can't be understood: %s",
                            PEFT_QUOTE(t->name), name.why))
                return false;
            continue;
        }
        if (have_adapter && strcmp(adapter, name.adapter)) {
            if (!faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" belongs to adapter \"%s\", others of the file to \"%s\"",
                            PEFT_QUOTE(t->name), PEFT_QUOTE(name.adapter), PEFT_QUOTE(adapter)))
                return false;
            continue;
        }
        have_adapter = true;
        memcpy(adapter, name.adapter, sizeof adapter);
        bool fits;
        if (!check_tensor(p, t, &fits))
            return false;
        if (fits)
            p->item[p->items++] = (struct item){t, name.layer, (int32_t)name.expert,
                                                name.kind == PEFT_LINEAR ? (int32_t)name.projection : (int32_t)name.fused, name.b};
    }
    qsort(p->item, p->items, sizeof *p->item, compare_items);
    if (foreign &&
        !faults_warn(p->log, "%lld tensors adapt experts outside the decoder's layers and were not looked at", (long long)foreign))
        return false;
    return true;
}

/* ---- an adapter of another model ------------------------------------------------------------------------------- */

/* A size of the model that the adapter was made for: what is left of the candidates after all tensors that show it. */
struct size {
    int64_t candidate[2];
    int candidates;
    int64_t tensors;
};

static void narrow_size(struct size *s, int64_t a, int64_t b)
{
    int kept = 0;
    if (!s->tensors++) {
        *s = (struct size){{a, b}, a == b ? 1 : 2, 1};
        return;
    }
    for (int i = 0; i < s->candidates; i++)
        if (s->candidate[i] == a || s->candidate[i] == b)
            s->candidate[kept++] = s->candidate[i];
    s->candidates = kept;
}

/* One tensor alone may as well be at fault itself. */
static bool expect_size(struct planner *p, const struct size *s, const char *what, int32_t ours)
{
    if (s->tensors < 2 || !s->candidates || s->candidate[0] == ours || (s->candidates > 1 && s->candidate[1] == ours))
        return true;
    char or_so[32] = "";
    if (s->candidates > 1)
        snprintf(or_so, sizeof or_so, " or %lld", (long long)s->candidate[1]);
    return faults_add(p->log, ENGINE_BAD_ADAPTER, "the adapter is made for another %s (%lld%s, here %d)", what, (long long)s->candidate[0],
                      or_so, ours);
}

/* Where all tensors agree on a size that is not the model's, one sentence says more than one about each of them. */
static bool check_sizes(struct planner *p)
{
    struct size hidden = {0}, inter = {0};
    int64_t before = p->log->count;
    for (size_t i = 0; i < p->items; i++) {
        const struct item *item = &p->item[i], *next = item + 1;
        const int64_t *shape = item->tensor->shape, size = item->b ? shape[0] : shape[1];
        if (item->expert >= 0)
            narrow_size((item->slot == KERNEL_DOWN) == item->b ? &hidden : &inter, size, size);
        else if (!item->b && i + 1 < p->items && same_module(item, next) && next->b)
            narrow_size(&hidden, size, next->tensor->shape[0]); /* one of the two, whatever it adapts and however it lies */
    }
    return expect_size(p, &hidden, "hidden size", p->model->dims.hidden) &&
           expect_size(p, &inter, "intermediate size", p->model->dims.inter) && p->log->count == before;
}

/* Takes out what is beyond the model's layers and experts, with one fault for all of a kind. */
static bool check_ranges(struct planner *p)
{
    const struct item *items = p->item;
    struct item layer = {0}, expert = {0};
    size_t kept = 0, layers = 0, experts = 0;
    for (size_t i = 0; i < p->items; i++) {
        bool beyond_layers = items[i].layer >= p->model->checkpoint_layers, beyond_experts = items[i].expert >= p->model->experts;
        if (beyond_layers && !layers++)
            layer = items[i];
        if (beyond_experts && !experts++)
            expert = items[i];
        if (!beyond_layers && !beyond_experts)
            p->item[kept++] = items[i];
    }
    p->items = kept;
    if (layers && !faults_add(p->log, ENGINE_BAD_ADAPTER,
                              "tensor \"%s\" is for layer %lld; the model's last layer with experts is %lld; tensors beyond it: %zu",
                              PEFT_QUOTE(layer.tensor->name), (long long)layer.layer, (long long)p->model->checkpoint_layers - 1, layers))
        return false;
    return !experts ||
           faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" is for expert %d; the model has experts 0 to %d; tensors beyond them: %zu",
                      PEFT_QUOTE(expert.tensor->name), expert.expert, p->model->experts - 1, experts);
}

/* ---- pairing --------------------------------------------------------------------------------------------------- */

static const char *const parameter_names[] = {[KERNEL_GATE] = "gate_up_proj", [KERNEL_DOWN] = "down_proj"};

static bool targets(const struct planner *p, const char *module, const char *parameter)
{
    char key[PEFT_MAX_NAME + 32];
    int len = snprintf(key, sizeof key, "%s.%s", module, parameter);
    for (size_t i = 0; i < p->config->target_parameter_count; i++) {
        const char *target = p->config->target_parameters[i];
        size_t n = strlen(target);
        if (n <= (size_t)len && !strcmp(key + len - n, target) && (n == (size_t)len || key[len - (int)n - 1] == '.'))
            return true;
    }
    return false;
}

/* Which parameter a fused pair adapts. `outer` and `inner` tell whether the layer has such pairs. */
static bool resolve_fused(struct planner *p, const struct item *item, bool outer, bool inner, enum kernel_projection *out, bool *known)
{
    *known = true;
    switch (item->slot) {
    case PEFT_GATE_UP: *out = KERNEL_GATE; return true;
    case PEFT_DOWN: *out = KERNEL_DOWN; return true;
    case PEFT_INNER:
        *out = KERNEL_GATE;
        *known = outer;
        return outer || faults_add(p->log, ENGINE_BAD_ADAPTER,
                                   "tensor \"%s\" has none without base_layer beside it, so that its parameter is unknown",
                                   PEFT_QUOTE(item->tensor->name));
    default: break;
    }
    *out = KERNEL_DOWN;
    if (inner)
        return true;
    struct peft_name name;
    peft_name_parse(item->tensor->name, &name);
    bool gate_up = targets(p, name.module, parameter_names[KERNEL_GATE]), down = targets(p, name.module, parameter_names[KERNEL_DOWN]);
    if (gate_up)
        *out = KERNEL_GATE;
    *known = gate_up != down;
    return *known || faults_add(p->log, ENGINE_BAD_ADAPTER,
                                "tensor \"%s\": target_parameters of adapter_config.json names %s "
                                "down_proj of its module, so that its parameter is unknown",
                                PEFT_QUOTE(item->tensor->name), gate_up ? "both gate_up_proj and" : "neither gate_up_proj nor");
}

/* Rank and scale by the config; *rank is 0 when unknown. */
static bool find_scale(struct planner *p, const struct item *item, struct peft_pair *pair)
{
    struct peft_name name;
    peft_name_parse(item->tensor->name, &name);
    char module[PEFT_MAX_NAME + 32];
    if (item->expert >= 0)
        snprintf(module, sizeof module, "%s", name.module);
    else /* for a parameter, peft matches patterns against the parameter's name */
        snprintf(module, sizeof module, "%s.%s", name.module,
                 item->slot == PEFT_GATE_UP || item->slot == PEFT_DOWN ? "weight" : parameter_names[pair->projection]);
    struct engine_error error;
    if (peft_config_scale(p->config, module, &pair->rank, &pair->scale, &error) != ENGINE_OK) {
        pair->rank = 0;
        return faults_add_error(p->log, &error);
    }
    if (!isfinite(pair->scale))
        return faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\": lora_alpha over its rank %d is not finite",
                          PEFT_QUOTE(item->tensor->name), pair->rank);
    return true;
}

static bool expect_shape(struct planner *p, const struct safetensors_tensor *t, int64_t rows, int64_t cols, const char *what, bool *fits)
{
    if (t->shape[0] == rows && t->shape[1] == cols)
        return true;
    *fits = false;
    return faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" has shape %s; expected [%lld, %lld]: %s", PEFT_QUOTE(t->name),
                      shape_text(t).s, (long long)rows, (long long)cols, what);
}

static bool check_linear(struct planner *p, const struct peft_pair *pair, bool *fits)
{
    bool down = pair->projection == KERNEL_DOWN;
    int64_t in = down ? p->model->dims.inter : p->model->dims.hidden, out = down ? p->model->dims.hidden : p->model->dims.inter;
    return expect_shape(p, pair->a, pair->rank, in,
                        down ? "rank by adapter_config.json, intermediate size" : "rank by adapter_config.json, hidden size", fits) &&
           expect_shape(p, pair->b, out, pair->rank,
                        down ? "hidden size, rank by adapter_config.json" : "intermediate size, rank by adapter_config.json", fits);
}

static bool check_fused(struct planner *p, struct peft_pair *pair, bool *fits, bool *ambiguous)
{
    bool down = pair->projection == KERNEL_DOWN;
    int64_t in = down ? p->model->dims.inter : p->model->dims.hidden,
            out = down ? p->model->dims.hidden : 2 * (int64_t)p->model->dims.inter;
    int64_t ranks = (int64_t)p->model->experts * pair->rank, n = pair->a->shape[1], m = pair->b->shape[0];
    bool normal = n == in && m == out, swapped = n == out && m == in;
    *ambiguous = normal && swapped;
    pair->swapped = swapped;
    *fits = (normal || swapped) && pair->a->shape[0] == ranks && pair->b->shape[1] == ranks;
    if (!*fits)
        return faults_add(
            p->log, ENGINE_BAD_ADAPTER,
            "tensors \"%s\" of shape %s and lora_B of shape %s don't fit %s; expected [%lld, %lld] and [%lld, %lld], or [%lld, %lld] "
            "and [%lld, %lld]: %d experts of rank %d by adapter_config.json",
            PEFT_QUOTE(pair->a->name), shape_text(pair->a).s, shape_text(pair->b).s, parameter_names[pair->projection], (long long)ranks,
            (long long)in, (long long)out, (long long)ranks, (long long)ranks, (long long)out, (long long)in, (long long)ranks,
            p->model->experts, pair->rank);
    if (!*ambiguous) {
        p->seen_normal |= normal;
        p->seen_swapped |= swapped;
    }
    return true;
}

/* One module with both tensors: everything about it is checked, and it joins the plan if it fits. */
static bool add_pair(struct planner *p, const struct item *a, const struct item *b, bool outer, bool inner)
{
    struct peft_pair pair = {.a = a->tensor, .b = b->tensor, .layer = a->layer, .expert = a->expert};
    bool fits = true, ambiguous = false;
    if (a->expert >= 0)
        pair.projection = (enum kernel_projection)a->slot;
    else if (!resolve_fused(p, a, outer, inner, &pair.projection, &fits))
        return false;
    if (!fits)
        return true;
    if (!find_scale(p, a, &pair))
        return false;
    if (!pair.rank)
        return true;
    if (a->expert >= 0 ? !check_linear(p, &pair, &fits) : !check_fused(p, &pair, &fits, &ambiguous))
        return false;
    if (fits) {
        p->ambiguous[p->plan->pairs] = ambiguous;
        p->plan->pair[p->plan->pairs++] = pair;
    }
    return true;
}

static bool pair_up(struct planner *p)
{
    bool outer = false, inner = false;
    for (size_t i = 0; i < p->items;) {
        const struct item *first = &p->item[i], *a = NULL, *b = NULL;
        if (!i || first->layer != first[-1].layer) {
            outer = inner = false;
            for (size_t j = i; j < p->items && p->item[j].layer == first->layer && p->item[j].expert < 0; j++) {
                outer |= p->item[j].slot == PEFT_OUTER;
                inner |= p->item[j].slot == PEFT_INNER;
            }
        }
        for (; i < p->items && same_module(first, &p->item[i]); i++) {
            const struct item *item = &p->item[i], **side = item->b ? &b : &a;
            if (*side && !faults_add(p->log, ENGINE_BAD_ADAPTER, "tensors \"%s\" and \"%s\" are both lora_%c of one module",
                                     PEFT_QUOTE((*side)->tensor->name), PEFT_QUOTE(item->tensor->name), item->b ? 'B' : 'A'))
                return false;
            *side = item;
        }
        if (a && b) {
            if (!add_pair(p, a, b, outer, inner))
                return false;
        } else if (!faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" has no lora_%c beside it", PEFT_QUOTE((a ? a : b)->tensor->name),
                               a ? 'B' : 'A')) {
            return false;
        }
    }
    return true;
}

/* ---- what only shows over the whole file ------------------------------------------------------------------------ */

/* For parameters with in = out. What peft did by itself since 0.19: parameters are [E, out, in] unless the model says that
 * they are transposed (gpt_oss does, llama4 does not); before, all were taken for [E, in, out]. */
static const char *choose_orientation(const struct planner *p, bool *swapped)
{
    const struct peft_config *c = p->config;
    if (p->seen_normal || p->seen_swapped) {
        *swapped = p->seen_swapped;
        return p->seen_normal && p->seen_swapped ? "the file's other parameters disagree" : NULL;
    }
    if (c->version_major < 0)
        return "adapter_config.json has no peft_version that would tell";
    if (c->version_development && c->version_major == 0 && c->version_minor == 18)
        return "peft_version is a state between two releases";
    bool current = c->version_major > 0 || c->version_minor >= 19;
    bool marked = p->model->transposed && p->model->fused == MODEL_FUSED_INTERLEAVED;
    *swapped = marked ? false : p->model->transposed == current;
    return NULL;
}

static bool orient(struct planner *p)
{
    for (size_t i = 0; i < p->plan->pairs; i++) {
        struct peft_pair *pair = &p->plan->pair[i];
        if (!p->ambiguous[i])
            continue;
        const char *why = choose_orientation(p, &pair->swapped);
        if (why && !faults_add(p->log, ENGINE_BAD_ADAPTER, "tensor \"%s\" fits %s both as it is and transposed, and %s",
                               PEFT_QUOTE(pair->a->name), parameter_names[pair->projection], why))
            return false;
    }
    return true;
}

/* A fused pair covers all experts: no Linear, and no second fused pair, may do so again. */
static bool check_overlap(struct planner *p)
{
    const struct peft_pair *fused[KERNEL_PROJECTIONS] = {NULL};
    for (size_t i = 0; i < p->plan->pairs; i++) {
        const struct peft_pair *pair = &p->plan->pair[i];
        if (!i || pair->layer != pair[-1].layer)
            memset(fused, 0, sizeof fused);
        const struct peft_pair *other = fused[pair->projection == KERNEL_UP ? KERNEL_GATE : pair->projection];
        if (other && !faults_add(p->log, ENGINE_BAD_ADAPTER, "tensors \"%s\" and \"%s\" adapt the same projection of the same expert",
                                 PEFT_QUOTE(other->a->name), PEFT_QUOTE(pair->a->name)))
            return false;
        if (pair->expert < 0)
            fused[pair->projection] = pair;
    }
    return true;
}

bool peft_plan_create(const struct safetensors_file *file, struct peft_config *config, const struct model *model, struct faults *log,
                      struct peft_plan *out)
{
    struct planner p = {.model = model, .config = config, .log = log, .plan = out};
    *out = (struct peft_plan){0};
    bool on = collect(&p, file);
    if (on) {
        out->pair = calloc(p.items ? p.items : 1, sizeof *out->pair);
        p.ambiguous = calloc(p.items ? p.items : 1, sizeof *p.ambiguous);
        on = (out->pair && p.ambiguous) || faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory for %zu tensors", p.items);
    }
    on = on && check_sizes(&p) && check_ranges(&p) && pair_up(&p) && orient(&p) && check_overlap(&p);
    free(p.item);
    free(p.ambiguous);
    return on;
}

void peft_plan_finish(struct peft_plan *plan)
{
    free(plan->pair);
    plan->pair = NULL;
}
