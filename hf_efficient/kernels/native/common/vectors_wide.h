// Vectors of 16 lanes that take several registers, of REGISTER_BYTES each. See vectors.h. (GCC keeps vectors of its own
// that are wider than a register in memory.)

#pragma once

template <class T, int N> struct Wide;

template <class T, int N> struct HalfOf {
    typedef Wide<T, N / 2> type;
};
template <class T> struct HalfOf<T, 2> {
    typedef T type __attribute__((vector_size(REGISTER_BYTES), aligned(sizeof(T)), may_alias));
};

template <class T, int N> struct Wide {  // in N registers
    typedef typename HalfOf<T, N>::type Half;
    Half low, high;

    Wide() = default;
    INLINE Wide(const Wide &other) : low(other.low), high(other.high) {}  // GCC copies bytes, by smaller registers
    INLINE Wide &operator=(const Wide &other) { return low = other.low, high = other.high, *this; }
    INLINE Wide(Half low, Half high) : low(low), high(high) {}
    template <class U> INLINE explicit Wide(const Wide<U, N> &bits) : low((Half)bits.low), high((Half)bits.high) {}
    INLINE T operator[](int i) const {
        constexpr int LANES_OF_HALF = sizeof(Half) / sizeof(T);
        return i < LANES_OF_HALF ? low[i] : high[i - LANES_OF_HALF];
    }
} __attribute__((may_alias));

constexpr int REGISTERS_A_VECTOR = LANES * 4 / REGISTER_BYTES;
typedef Wide<float, REGISTERS_A_VECTOR> Floats;
typedef Wide<uint32_t, REGISTERS_A_VECTOR> Words;
typedef Wide<int32_t, REGISTERS_A_VECTOR> Ints;

template <class T> struct Same { typedef T type; };  // from which no type is deduced

#define OPERATOR(op) \
    template <class T, int N> INLINE Wide<T, N> operator op(Wide<T, N> a, Wide<T, N> b) { \
        return {a.low op b.low, a.high op b.high}; \
    } \
    template <class T, int N> INLINE Wide<T, N> operator op(Wide<T, N> a, typename Same<T>::type b) { \
        return {a.low op b, a.high op b}; \
    } \
    template <class T, int N> INLINE Wide<T, N> operator op(typename Same<T>::type a, Wide<T, N> b) { \
        return {a op b.low, a op b.high}; \
    } \
    template <class T, int N, class U> INLINE Wide<T, N> &operator op##=(Wide<T, N> &a, U b) { return a = a op b; }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(&)
OPERATOR(|)
OPERATOR(^)
#undef OPERATOR

#define OPERATOR(op) \
    template <class T, int N> INLINE Wide<int32_t, N> operator op(Wide<T, N> a, Wide<T, N> b) { \
        typedef typename Wide<int32_t, N>::Half Half; \
        return {(Half)(a.low op b.low), (Half)(a.high op b.high)}; \
    } \
    template <class T, int N> INLINE Wide<int32_t, N> operator op(Wide<T, N> a, typename Same<T>::type b) { \
        typedef typename Wide<int32_t, N>::Half Half; \
        return {(Half)(a.low op b), (Half)(a.high op b)}; \
    }
OPERATOR(<)
OPERATOR(>)
OPERATOR(==)
OPERATOR(!=)
#undef OPERATOR

template <class T, int N> INLINE Wide<T, N> operator-(Wide<T, N> a) { return {-a.low, -a.high}; }
template <class T, int N> INLINE Wide<T, N> operator~(Wide<T, N> a) { return {~a.low, ~a.high}; }
template <class T, int N> INLINE Wide<T, N> operator<<(Wide<T, N> a, int bits) {
    return {a.low << bits, a.high << bits};
}
template <class T, int N> INLINE Wide<T, N> operator>>(Wide<T, N> a, int bits) {
    return {a.low >> bits, a.high >> bits};
}

// power * 2 ** whole, for whole numbers from -252 to 254
static INLINE Ints to_ints(Floats values);
static INLINE Floats scaled(Floats power, Floats whole) {
    const Ints n = to_ints(whole), half = n >> 1;
    return power * (Floats)((half + 127) << 23) * (Floats)((n - half + 127) << 23);
}

// V at any address. (A copy of its bytes would go through the stack, by smaller registers.)
template <class V> struct __attribute__((packed, may_alias)) Anywhere {
    V value;
};

// The first `count` elements (as many as there are lanes where it is larger), and zeros.
template <class V, class T> static INLINE V load_elements(const T *from, int64_t count) {
    if (count >= int64_t(sizeof(V) / sizeof(T))) return ((const Anywhere<V> *)from)->value;
    T some[sizeof(V) / sizeof(T)] = {};
    if (count > 0) memcpy(some, from, count * sizeof(T));
    return ((const Anywhere<V> *)some)->value;
}
template <class V, class T> static INLINE void store_elements(T *to, int64_t count, V values) {
    if (count >= int64_t(sizeof(V) / sizeof(T))) ((Anywhere<V> *)to)->value = values;
    else if (count > 0) {
        T some[sizeof(V) / sizeof(T)];
        ((Anywhere<V> *)some)->value = values;
        memcpy(to, some, count * sizeof(T));
    }
}
static INLINE Floats load_some(const float *from, int64_t count) { return load_elements<Floats>(from, count); }
static INLINE Halves load_some(const uint16_t *from, int64_t count) { return load_elements<Halves>(from, count); }
static INLINE Bytes load_some(const uint8_t *from, int64_t count) { return load_elements<Bytes>(from, count); }
static INLINE Words load_pairs(const uint16_t *from, int64_t count) { return load_elements<Words>(from, count); }  // 32
static INLINE void store_some(float *to, int64_t count, Floats values) { store_elements(to, count, values); }
static INLINE void store_some(uint16_t *to, int64_t count, Halves values) { store_elements(to, count, values); }
static INLINE void store_some(uint8_t *to, int64_t count, Bytes values) { store_elements(to, count, values); }
