// How is a chunk updated? Main memory is read once and written once, in one of two ways.
//
// Direct, for what is common (Adam with float32 moments): one loop widens, applies the rule and narrows. In stages, for
// all the rest: blocks that stay in the first-level cache are widened, then the rule is applied, then they are narrowed;
// memory waits while the CPU works there, so that is slower, but not every combination needs a loop of its own.
//
// Included several times, each time for another level of vector instructions, so it has no include guard. Loops are
// written for the compiler's vectoriser: no calls, no branches that depend on an element.

#include "kernel_numbers.h"

enum { BLOCK = RUN, TORCH_VECTOR = 8 };  // a run of 8-bit state has one scale

struct Scratch {
  alignas(64) float weight[BLOCK];
  alignas(64) float gradient[BLOCK];
  alignas(64) float first[BLOCK];
  alignas(64) float second[BLOCK];
};

// What is found out on the way: a checksum of the weights that were written, and the bits of the largest magnitude among
// the gradients (of one that is not finite where there is one).
struct Found {
  uint32_t checksum;
  uint32_t largest;
  INLINE_MEMBER void add(Found other) {
    checksum += other.checksum;
    largest = larger(largest, other.largest);
  }
};

// One element at a time: what the direct loops are made of. `store` returns what the checksum takes up -----------------
struct PlainWeights {
  float *RESTRICT weight;
  INLINE_MEMBER float load(int i) const { return weight[i]; }
  INLINE_MEMBER uint32_t store(int i, float value) const {
    weight[i] = value;
    return 0;
  }
  INLINE_MEMBER PlainWeights from(int i) const { return {weight + i}; }
};

struct SplitWeights {  // ties up in the bits: then 16 more bits tell all floats of one bfloat16 apart
  uint16_t *RESTRICT weight;
  uint16_t *RESTRICT remainder;
  uint32_t factor;
  INLINE_MEMBER float load(int i) const {
    return as_float(((uint32_t)weight[i] << 16) + (uint32_t)(int32_t)(int16_t)remainder[i]);
  }
  INLINE_MEMBER uint32_t store(int i, float value) const {
    uint32_t bits = value != value ? 0x7fc00000u : as_bits(value);
    uint32_t high = (bits + 0x8000u) >> 16;
    weight[i] = (uint16_t)high;
    remainder[i] = (uint16_t)bits;
    return high * (factor + 2u * (uint32_t)i);
  }
  INLINE_MEMBER SplitWeights from(int i) const { return {weight + i, remainder + i, factor + 2u * (uint32_t)i}; }
};

struct FullWeights {  // the master counts where it rounds to the weight, ties to either side; else somebody wrote it
  uint16_t *RESTRICT weight;
  float *RESTRICT master;
  INLINE_MEMBER float load(int i) const {
    uint32_t ties_up = (as_bits(master[i]) + 0x8000u) >> 16;
    bool counts = (to_bfloat16(master[i]) == weight[i]) | ((ties_up == weight[i]) & (master[i] == master[i]));
    return counts ? master[i] : from_bfloat16(weight[i]);
  }
  INLINE_MEMBER uint32_t store(int i, float value) const {
    master[i] = value;
    weight[i] = to_bfloat16(value);
    return 0;
  }
  INLINE_MEMBER FullWeights from(int i) const { return {weight + i, master + i}; }
};

struct Float16Weights {
  uint16_t *RESTRICT weight;
  float *RESTRICT master;
  INLINE_MEMBER float load(int i) const {
    return to_float16(master[i]) == weight[i] ? master[i] : from_float16(weight[i]);
  }
  INLINE_MEMBER uint32_t store(int i, float value) const {
    master[i] = value;
    weight[i] = to_float16(value);
    return 0;
  }
};

struct RoundedWeights {  // no master: the weight is the exact value, and its change is rounded up or down by chance
  uint16_t *RESTRICT weight;
  uint32_t place;
  INLINE_MEMBER float load(int i) const { return from_bfloat16(weight[i]); }
  INLINE_MEMBER uint32_t store(int i, float value) const {
    weight[i] = to_bfloat16_stochastic(value, random_bits(place + (uint32_t)i));
    return 0;
  }
  INLINE_MEMBER RoundedWeights from(int i) const { return {weight + i, place + (uint32_t)i}; }
};

struct Gradient32 {
  const float *RESTRICT gradient;
  float scale;
  INLINE_MEMBER float load(int i) const { return gradient[i] * scale; }
  INLINE_MEMBER Gradient32 from(int i) const { return {gradient + i, scale}; }
};

struct Gradient16 {
  const uint16_t *RESTRICT gradient;
  INLINE_MEMBER float load(int i) const { return from_bfloat16(gradient[i]); }
  INLINE_MEMBER Gradient16 from(int i) const { return {gradient + i}; }
};

struct ScaledGradient16 {  // rounded as if the gradient itself had been scaled in place
  const uint16_t *RESTRICT gradient;
  float scale;
  INLINE_MEMBER float load(int i) const { return from_bfloat16(to_bfloat16(from_bfloat16(gradient[i]) * scale)); }
  INLINE_MEMBER ScaledGradient16 from(int i) const { return {gradient + i, scale}; }
};

// Into scratch ---------------------------------------------------------------------------------------------------------
INLINE const float *load_gradient(const void *from, int number, float scale, float *RESTRICT into, int count) {
  if (number == FLOAT32) {
    const float *source = (const float *)from;
    if (scale == 1.0f) return source;
    for (int i = 0; i < count; ++i) into[i] = source[i] * scale;
  } else if (number == BFLOAT16) {
    const uint16_t *source = (const uint16_t *)from;
    if (scale == 1.0f)
      for (int i = 0; i < count; ++i) into[i] = from_bfloat16(source[i]);
    else  // rounded as if the gradient itself had been scaled in place
      for (int i = 0; i < count; ++i) into[i] = from_bfloat16(to_bfloat16(from_bfloat16(source[i]) * scale));
  } else {
    const uint16_t *source = (const uint16_t *)from;
    if (scale == 1.0f)
      for (int i = 0; i < count; ++i) into[i] = from_float16(source[i]);
    else
      for (int i = 0; i < count; ++i) into[i] = from_float16(to_float16(from_float16(source[i]) * scale));
  }
  return into;
}

template <class Weights>
INLINE void load_weights(Weights weight, float *RESTRICT into, int count) {
  for (int i = 0; i < count; ++i) into[i] = weight.load(i);
}

template <class Weights>
INLINE uint32_t store_weights(const float *RESTRICT from, Weights weight, int count) {
  uint32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += weight.store(i, from[i]);
  return sum;
}

// State that is narrower than float32: `address` is that of element `start`, which begins a run.
template <bool SIGNED>
INLINE void load_state(const void *address, int number, float *RESTRICT into, int count) {
  if (number == EIGHT_BIT) return load_run<SIGNED>((const uint8_t *)address, into, count);
  const uint16_t *from = (const uint16_t *)address;
  for (int i = 0; i < count; ++i) into[i] = from_bfloat16(from[i]);
}

template <bool SIGNED>
INLINE void store_state(const float *RESTRICT from, void *address, int number, uint32_t place, int count) {
  const int shift = SIGNED ? 0 : 16;  // each takes its own half of an element's random bits
  if (number == EIGHT_BIT) return store_run<SIGNED>(from, (uint8_t *)address, place, count);
  uint16_t *into = (uint16_t *)address;
  for (int i = 0; i < count; ++i) into[i] = to_bfloat16_stochastic(from[i], random_bits(place + (uint32_t)i) >> shift);
}

// Rules: the order of operations and the fused multiply-adds are those of PyTorch's fused CPU kernels -----------------
// Those work on vectors of 8 (also where the CPU has longer ones) and do the elements that are left over one by one;
// there its compiler fused the other one of two multiplications with the addition. TAIL marks them.
template <bool TAIL, bool ADDED_DECAY, bool AMSGRAD, class Weights, class Gradient>
INLINE Found adam(const Constants &c, Weights weight, Gradient gradient, float *RESTRICT first,
                     float *RESTRICT second, float *RESTRICT maximum, int count) {
  const float sign = c.maximize ? -1.0f : 1.0f;
  const bool small = c.take_first < 0.5f;
  const float pull = small ? c.take_first : c.take_first - 1.0f;
  uint32_t sum = 0, largest = 0;
  for (int i = 0; i < count; ++i) {
    float g = gradient.load(i) * sign;
    float w = weight.load(i);
    largest = larger(largest, magnitude_bits(g));
    if (ADDED_DECAY)
      g = FMA(w, c.decay, g);
    else
      w = w * c.decay;
    float m = first[i];
    m = FMA(pull, g - m, small ? m : g);
    float v = TAIL ? FMA(second[i], c.keep_second, c.take_second * g * g)
                   : FMA(c.take_second * g, g, second[i] * c.keep_second);
    first[i] = m;
    second[i] = v;
    if (AMSGRAD) {
      v = maximum[i] > v ? maximum[i] : v;
      maximum[i] = v;
    }
    float denominator = __builtin_sqrtf(v) / c.correction + c.epsilon;
    sum += weight.store(i, w + c.step_size * m / denominator);
  }
  return Found{sum, largest};
}

template <bool TAIL, class Weights, class Gradient>
INLINE Found any_adam(const Constants &c, Weights weight, Gradient gradient, float *first, float *second,
                         float *maximum, int count) {
  if (c.flags & 1)
    return maximum ? adam<TAIL, true, true>(c, weight, gradient, first, second, maximum, count)
                   : adam<TAIL, true, false>(c, weight, gradient, first, second, maximum, count);
  return maximum ? adam<TAIL, false, true>(c, weight, gradient, first, second, maximum, count)
                 : adam<TAIL, false, false>(c, weight, gradient, first, second, maximum, count);
}

template <bool TAIL, bool ADDED_DECAY, bool MOMENTUM, bool NESTEROV>
INLINE void sgd(const Constants &c, bool first_step, float *RESTRICT weight, const float *RESTRICT gradient,
                float *RESTRICT first, int count) {
  const float sign = c.maximize ? -1.0f : 1.0f;
  for (int i = 0; i < count; ++i) {
    float g = gradient[i] * sign;
    float w = weight[i];
    if (ADDED_DECAY) g = FMA(w, c.decay, g);
    if (MOMENTUM) {
      float kept = TAIL ? FMA(first[i], c.keep_first, g * c.take_first) : FMA(g, c.take_first, first[i] * c.keep_first);
      float m = first_step ? g : kept;
      first[i] = m;
      g = NESTEROV ? FMA(m, c.keep_first, g) : m;
    }
    weight[i] = FMA(g, c.step_size, w);
  }
}

INLINE void lion(const Constants &c, float *RESTRICT weight, const float *RESTRICT gradient, float *RESTRICT first,
                 int count) {
  const float sign = c.maximize ? -1.0f : 1.0f;
  for (int i = 0; i < count; ++i) {
    float g = gradient[i] * sign;
    float m = first[i];
    float direction = FMA(g, c.take_first, m * c.keep_first);
    direction = direction > 0.0f ? 1.0f : (direction < 0.0f ? -1.0f : 0.0f);  // of NaN as torch.sign
    weight[i] = FMA(direction, c.step_size, weight[i] * c.decay);
    first[i] = FMA(g, c.take_second, m * c.keep_second);
  }
}

template <bool TAIL>
INLINE void apply_to(const Constants &c, const Task &task, float *weight, const float *gradient, float *first,
                     float *second, float *maximum, int count) {
  const bool added = c.flags & 1;
  if (c.rule == RULE_LION) {
    lion(c, weight, gradient, first, count);
  } else if (c.rule == RULE_ADAM) {
    any_adam<TAIL>(c, PlainWeights{weight}, Gradient32{gradient, 1.0f}, first, second, maximum, count);
  } else if (!first) {
    added ? sgd<TAIL, true, false, false>(c, false, weight, gradient, first, count)
          : sgd<TAIL, false, false, false>(c, false, weight, gradient, first, count);
  } else if (c.flags & 2) {
    added ? sgd<TAIL, true, true, true>(c, task.first_step, weight, gradient, first, count)
          : sgd<TAIL, false, true, true>(c, task.first_step, weight, gradient, first, count);
  } else {
    added ? sgd<TAIL, true, true, false>(c, task.first_step, weight, gradient, first, count)
          : sgd<TAIL, false, true, false>(c, task.first_step, weight, gradient, first, count);
  }
}

INLINE void apply(const Constants &c, const Task &task, float *weight, const float *gradient, float *first,
                  float *second, float *maximum, int body, int tail) {
  apply_to<false>(c, task, weight, gradient, first, second, maximum, body);
  if (tail)
    apply_to<true>(c, task, weight + body, gradient + body, first ? first + body : first,
                   second ? second + body : second, maximum ? maximum + body : maximum, tail);
}

// Chunks ---------------------------------------------------------------------------------------------------------------
INLINE const char *at(const void *base, int64_t element, int number) {
  if (number == EIGHT_BIT) return (const char *)base + element / RUN * RECORD;
  return (const char *)base + element * (number == FLOAT32 ? 4 : 2);
}

struct Range {  // elements of a task
  int64_t start;
  int count;
  int tail;  // how many of them, the last ones, PyTorch does one by one
};

template <class Weights, class Gradient>
static Found direct(const Constants &c, const Task &task, Range range, Weights weight, Gradient gradient) {
  float *first = (float *)task.first + range.start, *second = (float *)task.second + range.start;
  float *maximum = task.maximum ? task.maximum + range.start : nullptr;
  const int body = range.count - range.tail;
  Found found = any_adam<false>(c, weight, gradient, first, second, maximum, body);
  if (range.tail)
    found.add(any_adam<true>(c, weight.from(body), gradient.from(body), first + body, second + body,
                             maximum ? maximum + body : maximum, range.tail));
  return found;
}

template <class Weights>
INLINE Found direct_of(const Constants &c, const Task &task, Range range, Weights weight) {
  if (task.gradient_number == FLOAT32)
    return direct(c, task, range, weight, Gradient32{(const float *)task.gradient + range.start, c.gradient_scale});
  const uint16_t *gradient = (const uint16_t *)task.gradient + range.start;
  if (c.gradient_scale == 1.0f) return direct(c, task, range, weight, Gradient16{gradient});
  return direct(c, task, range, weight, ScaledGradient16{gradient, c.gradient_scale});
}

INLINE bool goes_direct(const Constants &c, const Task &task) {
  return c.rule == RULE_ADAM && task.state_number == FLOAT32 && task.gradient_number != FLOAT16 &&
         task.weight_number != FLOAT16;
}

// Where the random numbers of element `start` are: those for its moments, and others for its weight.
INLINE uint32_t place_of(const Constants &c, const Task &task, int64_t start, bool of_weight) {
  const uint32_t key = random_bits(c.seed + task.stream);
  return (of_weight ? random_bits(~key) : key) + task.place + (uint32_t)start;
}

static Found in_stages(const Constants &c, const Task &task, Range range, Scratch &scratch) {
  const int64_t start = range.start;
  const int count = range.count;
  const float *gradient = load_gradient(at(task.gradient, start, task.gradient_number), task.gradient_number,
                                        c.gradient_scale, scratch.gradient, count);
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = larger(largest, magnitude_bits(gradient[i]));
  float *weight = (float *)task.weight + start;
  uint16_t *narrow = (uint16_t *)task.weight + start;
  const SplitWeights split{narrow, (uint16_t *)task.master + start, 2u * (uint32_t)start + 1u};
  const FullWeights full{narrow, (float *)task.master + start};
  const Float16Weights half{narrow, (float *)task.master + start};
  const RoundedWeights alone{narrow, place_of(c, task, start, true)};
  if (task.master_form != MASTER_IS_WEIGHT) {
    weight = scratch.weight;
    if (task.master_form == MASTER_SPLIT)
      load_weights(split, weight, count);
    else if (task.master_form == MASTER_NONE)
      load_weights(alone, weight, count);
    else if (task.weight_number == BFLOAT16)
      load_weights(full, weight, count);
    else
      load_weights(half, weight, count);
  }
  float *first = task.first ? (float *)at(task.first, start, task.state_number) : nullptr;
  float *second = task.second ? (float *)at(task.second, start, task.state_number) : nullptr;
  float *maximum = task.maximum ? task.maximum + start : nullptr;
  if (task.state_number == FLOAT32) {
    apply(c, task, weight, gradient, first, second, maximum, count - range.tail, range.tail);
  } else {
    const int number = task.state_number;
    if (first) load_state<true>(first, number, scratch.first, count);
    if (second) load_state<false>(second, number, scratch.second, count);
    apply(c, task, weight, gradient, first ? scratch.first : nullptr, second ? scratch.second : nullptr, maximum,
          count - range.tail, range.tail);
    uint32_t place = place_of(c, task, start, false);
    if (first) store_state<true>(scratch.first, first, number, place, count);
    if (second) store_state<false>(scratch.second, second, number, place, count);
  }
  if (task.master_form == MASTER_IS_WEIGHT) return Found{0, largest};
  if (task.master_form == MASTER_SPLIT) return Found{store_weights(weight, split, count), largest};
  if (task.master_form == MASTER_NONE)
    store_weights(weight, alone, count);
  else if (task.weight_number == BFLOAT16)
    store_weights(weight, full, count);
  else
    store_weights(weight, half, count);
  return Found{0, largest};
}

static Found update(const Constants &c, const Task &task, int64_t start, int64_t end, Scratch &scratch) {
  const int tail = end == task.elements ? (int)(task.elements % TORCH_VECTOR) : 0;
  if (goes_direct(c, task)) {
    Range range{start, (int)(end - start), tail};
    if (task.master_form == MASTER_IS_WEIGHT)
      return direct_of(c, task, range, PlainWeights{(float *)task.weight + start});
    uint16_t *weight = (uint16_t *)task.weight + start;
    if (task.master_form == MASTER_SPLIT)
      return direct_of(c, task, range,
                       SplitWeights{weight, (uint16_t *)task.master + start, 2u * (uint32_t)start + 1u});
    if (task.master_form == MASTER_NONE)
      return direct_of(c, task, range, RoundedWeights{weight, place_of(c, task, start, true)});
    return direct_of(c, task, range, FullWeights{weight, (float *)task.master + start});
  }
  Found found{0, 0};
  for (; start + BLOCK < end; start += BLOCK) found.add(in_stages(c, task, Range{start, BLOCK, 0}, scratch));
  found.add(in_stages(c, task, Range{start, (int)(end - start), tail}, scratch));
  return found;
}

static int64_t task_of(const Job &job, int64_t chunk) {
  int64_t low = 0, high = job.task_count - 1;
  while (low < high) {
    int64_t middle = (low + high + 1) / 2;
    if (job.tasks[middle].chunk <= chunk)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

static void work(Job &job) {
  Scratch scratch;
  for (;;) {
    int64_t chunk = __atomic_fetch_add(&job.next_chunk, 1, __ATOMIC_RELAXED);
    if (chunk >= job.chunk_count) return;
    Task &task = job.tasks[task_of(job, chunk)];
    const Constants &c = job.constants[task.constants];
    int64_t start = (chunk - task.chunk) * CHUNK_ELEMENTS;
    int64_t end = start + CHUNK_ELEMENTS < task.elements ? start + CHUNK_ELEMENTS : task.elements;
    Found found = update(c, task, start, end, scratch);
    __atomic_fetch_add(&task.checksum, found.checksum, __ATOMIC_RELAXED);
    if (found.largest >= 0x7f800000u) __atomic_fetch_add(&task.not_finite, 1u, __ATOMIC_RELAXED);
  }
}
