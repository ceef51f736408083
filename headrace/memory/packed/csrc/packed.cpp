// How are 16-bit floats packed into 12 bits and back? Sign and mantissa take 8, one of 15 exponents 4; others escape.
//
// A group is 128 words in 192 bytes: 128 bytes of sign and mantissa, then 64 bytes of codes. Code byte i has the code
// of word i in its low half, and that of word i + 64 in its high half. Groups lie one after the other, so any range of
// words is one range of bytes, and both packing and unpacking work in place: see format.py.
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_LEVELS 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

enum { WORDS = 128, HALF = 64, BYTES = 192, ESCAPE = 15 };
static const int64_t GROUPS_AT_A_TIME = 64, SAMPLED = 9;

static void unpack_plain(const uint8_t *groups, int64_t count, const uint8_t *palette, uint16_t *out) {
  uint16_t exponents[16];
  for (int i = 0; i < 16; ++i) exponents[i] = (uint16_t)(palette[i] << 7);
  for (int64_t g = 0; g < count; ++g, groups += BYTES, out += WORDS) {
    uint8_t group[BYTES];
    memcpy(group, groups, BYTES);
    for (int i = 0; i < HALF; ++i) {
      out[i] = (uint16_t)((group[i] & 0x80) << 8 | (group[i] & 0x7f) | exponents[group[WORDS + i] & 15]);
      out[i + HALF] =
          (uint16_t)((group[i + HALF] & 0x80) << 8 | (group[i + HALF] & 0x7f) | exponents[group[WORDS + i] >> 4]);
    }
  }
}

#ifdef HAS_LEVELS
// A word's low byte has the exponent's last bit and the mantissa; its high byte has the sign and the exponent's rest.
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2")))

AVX2 static void unpack_avx2(const uint8_t *groups, int64_t count, const uint8_t *palette, uint16_t *out) {
  const __m128i exponents = _mm_loadu_si128((const __m128i *)palette);
  const __m256i low = _mm256_broadcastsi128_si256(_mm_slli_epi16(_mm_and_si128(exponents, _mm_set1_epi8(1)), 7));
  const __m256i high =
      _mm256_broadcastsi128_si256(_mm_and_si128(_mm_srli_epi16(exponents, 1), _mm_set1_epi8(0x7f)));
  const __m256i nibble = _mm256_set1_epi8(15), sign = _mm256_set1_epi8((char)0x80);
  for (int64_t g = 0; g < count; ++g, groups += BYTES, out += WORDS) {
    __m256i bytes[4], codes[4];
    for (int i = 0; i < 4; ++i) bytes[i] = _mm256_loadu_si256((const __m256i *)(groups + 32 * i));
    for (int i = 0; i < 2; ++i) {
      const __m256i both = _mm256_loadu_si256((const __m256i *)(groups + WORDS + 32 * i));
      codes[i] = _mm256_and_si256(both, nibble);
      codes[i + 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    }
    for (int i = 0; i < 4; ++i) {
      const __m256i first = _mm256_or_si256(_mm256_andnot_si256(sign, bytes[i]), _mm256_shuffle_epi8(low, codes[i]));
      const __m256i second = _mm256_or_si256(_mm256_and_si256(sign, bytes[i]), _mm256_shuffle_epi8(high, codes[i]));
      const __m256i even = _mm256_unpacklo_epi8(first, second), odd = _mm256_unpackhi_epi8(first, second);
      __m256i *to = (__m256i *)(out + 32 * i);
      _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
}

AVX512 static void unpack_avx512(const uint8_t *groups, int64_t count, const uint8_t *palette, uint16_t *out) {
  const __m128i exponents = _mm_loadu_si128((const __m128i *)palette);
  const __m512i low = _mm512_broadcast_i32x4(_mm_slli_epi16(_mm_and_si128(exponents, _mm_set1_epi8(1)), 7));
  const __m512i high = _mm512_broadcast_i32x4(_mm_and_si128(_mm_srli_epi16(exponents, 1), _mm_set1_epi8(0x7f)));
  const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
  const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t g = 0; g < count; ++g, groups += BYTES, out += WORDS) {
    const __m512i both = _mm512_loadu_si512(groups + WORDS);
    const __m512i bytes[2] = {_mm512_loadu_si512(groups), _mm512_loadu_si512(groups + HALF)};
    const __m512i codes[2] = {_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble)};
    for (int i = 0; i < 2; ++i) {
      const __m512i first = _mm512_or_si512(_mm512_andnot_si512(sign, bytes[i]), _mm512_shuffle_epi8(low, codes[i]));
      const __m512i second = _mm512_or_si512(_mm512_and_si512(sign, bytes[i]), _mm512_shuffle_epi8(high, codes[i]));
      const __m512i even = _mm512_unpacklo_epi8(first, second), odd = _mm512_unpackhi_epi8(first, second);
      _mm512_storeu_si512(out + HALF * i, _mm512_permutex2var_epi64(even, lower, odd));
      _mm512_storeu_si512(out + HALF * i + 32, _mm512_permutex2var_epi64(even, upper, odd));
    }
  }
}
#endif

INLINE int64_t pack_body(const uint16_t *words, int64_t count, const uint8_t *palette, uint8_t *groups,
                         uint32_t *escapes, int64_t most) {
  int64_t escaped = 0;
  for (int64_t at = 0; at < count; at += WORDS, groups += BYTES) {
    uint16_t group[WORDS];
    uint8_t exponents[WORDS], codes[WORDS], bytes[WORDS], packed[HALF];
    const int64_t left = count - at;
    if (left >= WORDS) {
      memcpy(group, words + at, sizeof group);
    } else {  // repeats the last word: that adds no escapes
      for (int i = 0; i < WORDS; ++i) group[i] = words[at + (i < left ? i : left - 1)];
    }
    for (int i = 0; i < WORDS; ++i) {
      exponents[i] = (uint8_t)(group[i] >> 7);
      bytes[i] = (uint8_t)((group[i] >> 8 & 0x80) | (group[i] & 0x7f));
      codes[i] = ESCAPE;
    }
    for (int code = 0; code < ESCAPE; ++code) {
      const uint8_t wanted = palette[code];
      for (int i = 0; i < WORDS; ++i) {
        const uint8_t met = (uint8_t)-(uint8_t)(exponents[i] == wanted);
        codes[i] = (uint8_t)(codes[i] ^ (met & (ESCAPE ^ code)));
      }
    }
    uint8_t any = 0;
    for (int i = 0; i < WORDS; ++i) any |= (uint8_t)(codes[i] == ESCAPE);
    for (int i = 0; i < HALF; ++i) packed[i] = (uint8_t)(codes[i] | codes[i + HALF] << 4);
    memcpy(groups, bytes, sizeof bytes);
    memcpy(groups + WORDS, packed, sizeof packed);
    if (!any) continue;
    for (int i = 0; i < WORDS && i < left; ++i) {
      if (codes[i] != ESCAPE) continue;
      if (escaped == most) return -1;
      escapes[escaped++] = (uint32_t)(at + i) << 8 | exponents[i];
    }
  }
  return escaped;
}

static int64_t pack_plain(const uint16_t *w, int64_t n, const uint8_t *p, uint8_t *g, uint32_t *e, int64_t m) {
  return pack_body(w, n, p, g, e, m);
}
#ifdef HAS_LEVELS
AVX2 static int64_t pack_avx2(const uint16_t *w, int64_t n, const uint8_t *p, uint8_t *g, uint32_t *e, int64_t m) {
  return pack_body(w, n, p, g, e, m);
}
AVX512 static int64_t pack_avx512(const uint16_t *w, int64_t n, const uint8_t *p, uint8_t *g, uint32_t *e, int64_t m) {
  return pack_body(w, n, p, g, e, m);
}
#endif

static void unpack_groups(const uint8_t *groups, int64_t count, const uint8_t *palette, uint16_t *out, int32_t level) {
#ifdef HAS_LEVELS
  if (level == 2) return unpack_avx512(groups, count, palette, out);
  if (level == 1) return unpack_avx2(groups, count, palette, out);
#else
  (void)level;
#endif
  unpack_plain(groups, count, palette, out);
}

// The version that kernel.py checks.
EXPORT int32_t headrace_packed_version(void) { return 1; }

// The best level that this CPU has: 0 baseline, 1 AVX2, 2 AVX-512.
EXPORT int32_t headrace_packed_best_level(void) {
#ifdef HAS_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

// Finds the 15 most frequent exponents; among many groups, it samples every ninth one, as rows are no multiple of that.
// The last byte of the palette is not an exponent.
EXPORT void headrace_packed_choose(const uint16_t *words, int64_t count, uint8_t *palette) {
  uint32_t met[4][256] = {};
  const int64_t stride = count > SAMPLED * SAMPLED * WORDS ? SAMPLED * WORDS : (int64_t)WORDS;
  for (int64_t at = 0; at < count; at += stride)
    for (int64_t i = at; i < at + WORDS && i < count; ++i) ++met[i % 4][(uint8_t)(words[i] >> 7)];
  for (int e = 0; e < 256; ++e) met[0][e] += met[1][e] + met[2][e] + met[3][e] + 1;
  for (int code = 0; code < ESCAPE; ++code) {
    int best = 0;
    for (int e = 1; e < 256; ++e)
      if (met[0][e] > met[0][best]) best = e;
    palette[code] = (uint8_t)best;
    met[0][best] = 0;
  }
  palette[ESCAPE] = 0;
}

// Packs words. Returns how many escaped; -1 if more than `most`, and then `groups` is of no use. `groups` may begin 64
// bytes behind `words`: writes are never ahead of reads.
EXPORT int64_t headrace_packed_pack(const uint16_t *words, int64_t count, const uint8_t *palette, uint8_t *groups,
                                    uint32_t *escapes, int64_t most, int32_t level) {
#ifdef HAS_LEVELS
  if (level == 2) return pack_avx512(words, count, palette, groups, escapes, most);
  if (level == 1) return pack_avx2(words, count, palette, groups, escapes, most);
#else
  (void)level;
#endif
  return pack_plain(words, count, palette, groups, escapes, most);
}

// Unpacks words `first` to `first + count` into `out`. `groups` begins with the group of word `first`. It may be in the
// memory of `out`, if each group lies behind the place of its own words and of all words before them.
EXPORT void headrace_packed_unpack(const uint8_t *groups, const uint8_t *palette, const uint32_t *escapes,
                                   int64_t escaped, int64_t first, int64_t count, uint16_t *out, int32_t level) {
  int64_t next = 0, end = escaped;
  while (next < end) {
    const int64_t middle = (next + end) / 2;
    if ((int64_t)(escapes[middle] >> 8) < first) next = middle + 1;
    else end = middle;
  }
  const int64_t stop = first + count;
  for (int64_t at = first; at < stop;) {
    const int64_t skipped = at % WORDS, left = stop - at;
    int64_t done;
    if (skipped || left < WORDS) {
      uint16_t group[WORDS];
      unpack_groups(groups, 1, palette, group, level);
      done = WORDS - skipped;
      if (done > left) done = left;
      memcpy(out, group + skipped, 2 * (size_t)done);
      groups += BYTES;
    } else {
      const int64_t whole = left / WORDS < GROUPS_AT_A_TIME ? left / WORDS : GROUPS_AT_A_TIME;
      unpack_groups(groups, whole, palette, out, level);
      done = WORDS * whole;
      groups += BYTES * whole;
    }
    for (; next < escaped && (int64_t)(escapes[next] >> 8) < at + done; ++next) {
      const int64_t place = (int64_t)(escapes[next] >> 8) - at;
      out[place] = (uint16_t)((out[place] & 0x807f) | (escapes[next] & 0xff) << 7);
    }
    at += done;
    out += done;
  }
}
