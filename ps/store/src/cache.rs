//! Prefetching.
//!
//! This is one of the few files that may hold `unsafe` code.

/// Prefetches the memory of a value into the cache. Does nothing on processors other than x86-64.
#[inline]
pub(crate) fn prefetch<T: ?Sized>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE_BYTES: usize = 64;
        let start = std::ptr::from_ref(value).cast::<i8>();
        let end = start.wrapping_add(size_of_val(value));
        // The value may start inside a cache line.
        let mut line = start.wrapping_sub(start.addr() % LINE_BYTES);
        while line < end {
            // SAFETY: a prefetch has no effect on memory, for any address. SSE is part of every
            // x86-64 processor.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line) };
            line = line.wrapping_add(LINE_BYTES);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
