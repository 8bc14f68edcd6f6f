//! What the processor is told of memory that it is to have at hand.
//!
//! This is one of the few files that may hold `unsafe` code.

/// Has the memory that something takes fetched into the cache, as it is read soon.
#[inline]
pub(crate) fn fetch<T: ?Sized>(what: &T) {
    fetch_as::<false, T>(what);
}

/// The same of what is read once, and takes no room in the larger caches from what is read again.
#[inline]
pub(crate) fn fetch_once<T: ?Sized>(what: &T) {
    fetch_as::<true, T>(what);
}

#[inline]
fn fetch_as<const ONCE: bool, T: ?Sized>(what: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _mm_prefetch};
        const LINE_BYTES: usize = 64;
        let start = std::ptr::from_ref(what).cast::<i8>();
        let end = start.wrapping_add(size_of_val(what));
        // It need not start where a line does.
        let mut line = start.wrapping_sub(start.addr() % LINE_BYTES);
        while line < end {
            // SAFETY: a prefetch reads nothing, whatever the address. SSE is part of every x86-64
            // processor.
            unsafe {
                match ONCE {
                    true => _mm_prefetch::<_MM_HINT_NTA>(line),
                    false => _mm_prefetch::<_MM_HINT_T0>(line),
                }
            }
            line = line.wrapping_add(LINE_BYTES);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = what;
}
