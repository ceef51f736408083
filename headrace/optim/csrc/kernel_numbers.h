// How are narrow numbers widened, and floats narrowed? Included by kernel_body.h, once for each level.

INLINE float as_float(uint32_t bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
INLINE uint32_t as_bits(float value) { uint32_t bits; __builtin_memcpy(&bits, &value, 4); return bits; }

INLINE uint32_t larger(uint32_t one, uint32_t other) { return one > other ? one : other; }
INLINE uint32_t magnitude_bits(float value) { return as_bits(value) & 0x7fffffffu; }

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
  uint32_t quiet = value != value ? 0x40u : 0u;  // a NaN of which the lower half alone tells would become infinite
  return (uint16_t)((bits & 0x7f800000u) == 0x7f800000u ? bits >> 16 | quiet : rounded);
}

// 8-bit state: the largest magnitude of a run of 128 elements, and for each element the upper bits of a float, that of
// its magnitude relative to the largest, plus an offset. Near zero this is linear, else logarithmic, 16 codes for
// each power of two. A run with a value that is not finite is NaN as a whole. See eight_bit.py.
enum { RUN = 128, RECORD = RUN + 4 };

template <bool SIGNED>
struct Code {
  static constexpr uint32_t base = (SIGNED ? 127u - 8u : 127u - 16u) << 23;  // bits of the offset
  static constexpr float offset = SIGNED ? 0x1p-8f : 0x1p-16f;
  static constexpr float top = 0.96875f - offset;  // what the largest value becomes: the last code
  static constexpr uint32_t largest = SIGNED ? 127u : 255u;
};

template <bool SIGNED>
INLINE void load_run(const uint8_t *RESTRICT record, float *RESTRICT into, int count) {
  using C = Code<SIGNED>;
  float scale;
  __builtin_memcpy(&scale, record + RUN, 4);
  const float unit = scale * (1.0f / C::top);
  for (int i = 0; i < count; ++i) {
    uint32_t code = record[i];
    float value = (as_float(((code & C::largest) << 19) + C::base) - C::offset) * unit;
    into[i] = SIGNED ? as_float(as_bits(value) | (code & 0x80u) << 24) : value;
  }
}

template <bool SIGNED>
INLINE void store_run(const float *RESTRICT from, uint8_t *RESTRICT record, uint32_t place, int count) {
  using C = Code<SIGNED>;
  uint32_t most = 0;
  for (int i = 0; i < count; ++i) most = larger(most, magnitude_bits(from[i]));
  const bool sound = most >= 0x00800000u && most < 0x7f800000u;
  const float scale = sound ? as_float(most) : as_float(most < 0x00800000u ? 0u : 0x7fc00000u);
  __builtin_memcpy(record + RUN, &scale, 4);
  if (!sound) {
    __builtin_memset(record, 0, RUN);
    return;
  }
  const float inverse = C::top / scale;
  for (int i = 0; i < count; ++i) {
    uint32_t magnitude = magnitude_bits(from[i]);
    uint32_t random = random_bits(place + (uint32_t)i) >> (SIGNED ? 0 : 16) & 0xffffu;
    uint32_t code = (as_bits(as_float(magnitude) * inverse + C::offset) - C::base + (random << 3)) >> 19;
    code = code < C::largest ? code : C::largest;
    if (SIGNED)
      code |= as_bits(from[i]) >> 24 & 0x80u;
    else  // its weight would be divided by zero
      code |= (code == 0u) & (magnitude > 0u);
    record[i] = (uint8_t)code;
  }
}
