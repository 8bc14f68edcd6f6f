//! Prefetching.
//!
//! This is one of the few files that may hold `unsafe` code.

/// Asks the processor to load the memory of a value into its cache. Nothing happens on processors other than
/// x86-64.
#[inline]
pub(crate) fn fetch<T: ?Sized>(what: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE_BYTES: usize = 64;
        let start = std::ptr::from_ref(what).cast::<i8>();
        let end = start.wrapping_add(size_of_val(what));
        // The value need not start on a cache line.
        let mut line = start.wrapping_sub(start.addr() % LINE_BYTES);
        while line < end {
            // SAFETY: a prefetch reads nothing, whatever the address. SSE is part of every x86-64
            // processor.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line) };
            line = line.wrapping_add(LINE_BYTES);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = what;
}
