// What does the caller hand to the kernel? Plain structs: the same layout stands in kernel.py.
#pragma once
#include <stdint.h>

enum Rule { RULE_ADAM = 0, RULE_SGD = 1, RULE_LION = 2 };
enum Number { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, EIGHT_BIT = 3 };  // the last one: state alone

// How the exact float32 value of a weight is kept.
enum Master {
  MASTER_IS_WEIGHT = 0,  // the weight is float32 itself
  MASTER_SPLIT = 1,      // bfloat16 weight and the 16 bits that it lacks
  MASTER_FULL = 2,       // low-precision weight beside a float32 one
  MASTER_NONE = 3,       // bfloat16 weight alone, rounded stochastically
  MASTER_FORMS = 4,
};

// Constants of one update rule at one step, rounded to float32 as PyTorch's fused CPU optimizers round them.
struct Constants {
  int32_t rule;
  int32_t maximize;
  int32_t flags;         // 1 = weight decay is added to the gradient (Adam, SGD); SGD: 2 = nesterov
  uint32_t seed;         // of stochastic rounding: differs at every step
  float gradient_scale;  // 1 where nothing is clipped
  float decay;           // factor on the weight (AdamW, Lion) or on the weight added to the gradient (Adam, SGD)
  float keep_first;      // Adam, Lion: beta1; SGD: momentum
  float take_first;      // Adam, Lion: 1 - beta1; SGD: 1 - dampening
  float keep_second;     // beta2
  float take_second;     // 1 - beta2
  float correction;      // square root of Adam's second bias correction
  float epsilon;
  float step_size;       // what the update is multiplied with, its sign included
};

// One parameter, or a run of elements of one.
struct Task {
  void *weight;
  void *master;          // uint16_t remainders (split), float (full), or null
  const void *gradient;
  void *first;           // exp_avg, or the momentum buffer; null for SGD without momentum
  void *second;          // exp_avg_sq
  float *maximum;        // max_exp_avg_sq; null without amsgrad
  int64_t elements;
  int64_t chunk;         // number of its first chunk, counted over all tasks
  int32_t constants;     // index
  int32_t master_form;   // Master
  int32_t weight_number; // Number, of weight, gradient and state
  int32_t gradient_number;
  int32_t state_number;
  int32_t first_step;    // SGD: the momentum buffer has no contents yet
  uint32_t checksum;     // out: of the low-precision weights that were written (split form)
  uint32_t stream;       // of stochastic rounding: differs between parameters
  uint32_t place;        // of the first element in its parameter, for stochastic rounding
  uint32_t not_finite;   // out: chunks with a gradient that is not finite
};

struct Job {
  Task *tasks;
  const Constants *constants;
  int64_t task_count;
  int64_t chunk_count;
  int64_t next_chunk;    // taken by threads, one after the other
  int32_t level;         // of vector instructions: 0 baseline, 1 AVX2 with FMA, 2 AVX-512
};

enum { CHUNK_ELEMENTS = 1 << 16 };
