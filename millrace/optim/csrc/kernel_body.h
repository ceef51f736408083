// How is a chunk updated? In blocks that stay in the first-level cache: numbers are widened to float32, the rule is
// applied, the results are narrowed. Main memory is read once and written once.
//
// Included several times, each time for another level of vector instructions, so it has no include guard. Loops are
// written for the compiler's vectoriser: no calls, no branches that depend on an element.

enum { BLOCK = 512, TORCH_VECTOR = 8 };

struct Scratch {
  alignas(64) float weight[BLOCK];
  alignas(64) float gradient[BLOCK];
  alignas(64) float first[BLOCK];
  alignas(64) float second[BLOCK];
};

INLINE float as_float(uint32_t bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
INLINE uint32_t as_bits(float value) { uint32_t bits; __builtin_memcpy(&bits, &value, 4); return bits; }

// Narrow numbers -------------------------------------------------------------------------------------------------------
INLINE float from_bfloat16(uint16_t half) { return as_float((uint32_t)half << 16); }

INLINE uint16_t to_bfloat16(float value) {  // ties to even
  uint32_t bits = as_bits(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

INLINE float from_float16(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
  uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f);  // moves the exponent; exact for subnormals too
  uint32_t bits = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : finite;
  return as_float(bits | ((uint32_t)(half & 0x8000u) << 16));
}

INLINE uint16_t to_float16(float value) {  // ties to even
  uint32_t bits = as_bits(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;  // the addition rounds at the right bit
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  return (uint16_t)(sign | result);
}

// Bits for stochastic rounding: a hash of the element's place and the step, so that threads do not matter.
INLINE uint32_t random_bits(uint32_t place) {
  place ^= place >> 16;
  place *= 0x7feb352du;
  place ^= place >> 15;
  place *= 0x846ca68bu;
  return place ^ (place >> 16);
}

INLINE uint16_t to_bfloat16_stochastic(float value, uint32_t random) {
  uint32_t bits = as_bits(value);
  uint32_t rounded = (bits + (random & 0xffffu)) >> 16;
  return (uint16_t)((bits & 0x7f800000u) == 0x7f800000u ? bits >> 16 : rounded);
}

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

// A float32 master counts where it rounds to the weight that is there; elsewhere somebody wrote the weight.
INLINE void load_master(const uint16_t *weight, int number, int form, const void *master, float *RESTRICT into, int count) {
  if (form == MASTER_SPLIT) {
    const int16_t *remainder = (const int16_t *)master;
    for (int i = 0; i < count; ++i)
      into[i] = as_float(((uint32_t)weight[i] << 16) + (uint32_t)(int32_t)remainder[i]);
  } else if (number == BFLOAT16) {
    const float *exact = (const float *)master;
    for (int i = 0; i < count; ++i) into[i] = to_bfloat16(exact[i]) == weight[i] ? exact[i] : from_bfloat16(weight[i]);
  } else {
    const float *exact = (const float *)master;
    for (int i = 0; i < count; ++i) into[i] = to_float16(exact[i]) == weight[i] ? exact[i] : from_float16(weight[i]);
  }
}

INLINE uint32_t store_master(const float *RESTRICT from, uint16_t *RESTRICT weight, int number, int form, void *master,
                             int64_t place, int count) {
  uint32_t sum = 0;
  if (form == MASTER_SPLIT) {  // ties up in the bits: then 16 more bits tell all floats of one bfloat16 apart
    uint16_t *RESTRICT remainder = (uint16_t *)master;
    uint32_t factor = 2u * (uint32_t)place + 1u;
    for (int i = 0; i < count; ++i) {
      uint32_t bits = from[i] != from[i] ? 0x7fc00000u : as_bits(from[i]);
      uint32_t high = (bits + 0x8000u) >> 16;
      weight[i] = (uint16_t)high;
      remainder[i] = (uint16_t)bits;
      sum += high * (factor + 2u * (uint32_t)i);
    }
  } else if (number == BFLOAT16) {
    float *RESTRICT exact = (float *)master;
    for (int i = 0; i < count; ++i) {
      exact[i] = from[i];
      weight[i] = to_bfloat16(from[i]);
    }
  } else {
    float *RESTRICT exact = (float *)master;
    for (int i = 0; i < count; ++i) {
      exact[i] = from[i];
      weight[i] = to_float16(from[i]);
    }
  }
  return sum;
}

INLINE void load_state(const uint16_t *from, float *RESTRICT into, int count) {
  for (int i = 0; i < count; ++i) into[i] = from_bfloat16(from[i]);
}

INLINE void store_state(const float *from, uint16_t *into, uint32_t place, int shift, int count) {
  for (int i = 0; i < count; ++i) into[i] = to_bfloat16_stochastic(from[i], random_bits(place + (uint32_t)i) >> shift);
}

// Rules: the order of operations and the fused multiply-adds are those of PyTorch's fused CPU kernels -----------------
// Those work on vectors of 8 (also where the CPU has longer ones) and do the elements that are left over one by one;
// there its compiler fused the other one of two multiplications with the addition. TAIL marks them.
template <bool TAIL, bool ADDED_DECAY, bool AMSGRAD>
INLINE void adam(const Constants &c, float *RESTRICT weight, const float *RESTRICT gradient, float *RESTRICT first,
                 float *RESTRICT second, float *RESTRICT maximum, int count) {
  const float sign = c.maximize ? -1.0f : 1.0f;
  const bool small = c.take_first < 0.5f;
  const float pull = small ? c.take_first : c.take_first - 1.0f;
  for (int i = 0; i < count; ++i) {
    float g = gradient[i] * sign;
    float w = weight[i];
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
    weight[i] = w + c.step_size * m / denominator;
  }
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
    direction = direction > 0.0f ? 1.0f : (direction < 0.0f ? -1.0f : direction);
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
  } else if (c.rule == RULE_ADAM && added) {
    maximum ? adam<TAIL, true, true>(c, weight, gradient, first, second, maximum, count)
            : adam<TAIL, true, false>(c, weight, gradient, first, second, maximum, count);
  } else if (c.rule == RULE_ADAM) {
    maximum ? adam<TAIL, false, true>(c, weight, gradient, first, second, maximum, count)
            : adam<TAIL, false, false>(c, weight, gradient, first, second, maximum, count);
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

static void apply(const Constants &c, const Task &task, float *weight, const float *gradient, float *first,
                  float *second, float *maximum, int body, int tail) {
  apply_to<false>(c, task, weight, gradient, first, second, maximum, body);
  if (tail)
    apply_to<true>(c, task, weight + body, gradient + body, first ? first + body : first,
                   second ? second + body : second, maximum ? maximum + body : maximum, tail);
}

// Chunks ---------------------------------------------------------------------------------------------------------------
INLINE const char *at(const void *base, int64_t element, int number) {
  return (const char *)base + element * (number == FLOAT32 ? 4 : 2);
}

static void block(const Constants &c, Task &task, int64_t start, int count, Scratch &scratch, uint32_t &sum) {
  const int tail = start + count == task.elements ? (int)(task.elements % TORCH_VECTOR) : 0;
  const float *gradient = load_gradient(at(task.gradient, start, task.gradient_number), task.gradient_number,
                                        c.gradient_scale, scratch.gradient, count);
  float *weight = (float *)task.weight + start;
  uint16_t *narrow = (uint16_t *)task.weight + start;
  void *master = (void *)at(task.master, start, task.master_form == MASTER_SPLIT ? BFLOAT16 : FLOAT32);
  if (task.master_form != MASTER_IS_WEIGHT) {
    weight = scratch.weight;
    load_master(narrow, task.weight_number, task.master_form, master, weight, count);
  }
  float *first = task.first ? (float *)at(task.first, start, task.state_number) : nullptr;
  float *second = task.second ? (float *)at(task.second, start, task.state_number) : nullptr;
  float *maximum = task.maximum ? task.maximum + start : nullptr;
  if (task.state_number == FLOAT32) {
    apply(c, task, weight, gradient, first, second, maximum, count - tail, tail);
  } else {
    if (first) load_state((uint16_t *)first, scratch.first, count);
    if (second) load_state((uint16_t *)second, scratch.second, count);
    apply(c, task, weight, gradient, first ? scratch.first : nullptr, second ? scratch.second : nullptr, maximum,
          count - tail, tail);
    uint32_t place = random_bits(c.seed + task.stream) + (uint32_t)start;
    if (first) store_state(scratch.first, (uint16_t *)first, place, 0, count);
    if (second) store_state(scratch.second, (uint16_t *)second, place, 16, count);
  }
  if (task.master_form != MASTER_IS_WEIGHT)
    sum += store_master(weight, narrow, task.weight_number, task.master_form, master, start, count);
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
    uint32_t sum = 0;
    for (; start < end; start += BLOCK) {
      const int64_t left = end - start;
      block(c, task, start, left < BLOCK ? (int)left : (int)BLOCK, scratch, sum);
    }
    __atomic_fetch_add(&task.checksum, sum, __ATOMIC_RELAXED);
  }
}
