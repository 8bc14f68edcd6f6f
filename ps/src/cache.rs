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

/// Whether a loop that reads some streams in order and writes others past the cache gains by fetching what it
/// reads itself: on a Zen 5 it gains 1 to 9 %, on a Zen 4 most lose 2 to 15 %, and on a Xeon of 2021 a quarter.
/// Processors that nobody has measured fetch by themselves. Tests have it fetched everywhere, as what is asked
/// for must lie within what is read.
pub(crate) fn streams_gain_by_fetching() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::sync::LazyLock;
        static IS_ZEN_5: LazyLock<bool> =
            LazyLock::new(|| vendor_and_family() == (*b"AuthenticAMD", 0x1a));
        cfg!(test) || *IS_ZEN_5
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Who has made the processor, and which family of theirs it is.
#[cfg(target_arch = "x86_64")]
fn vendor_and_family() -> ([u8; 12], u32) {
    use std::arch::x86_64::__cpuid;
    // SAFETY: every x86-64 processor has the instruction, and these two leaves of it.
    #[allow(unused_unsafe, reason = "newer compilers know that it is safe")]
    let (vendor, signature) = unsafe { (__cpuid(0), __cpuid(1).eax) };
    let mut name = [0; 12];
    for (bytes, register) in name.chunks_exact_mut(4).zip([vendor.ebx, vendor.edx, vendor.ecx]) {
        bytes.copy_from_slice(&register.to_le_bytes());
    }
    // What does not fit into the family's four bits is added to them.
    let family = match (signature >> 8) & 0xf {
        0xf => 0xf + ((signature >> 20) & 0xff),
        family => family,
    };
    (name, family)
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

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_the_one_that_the_kernel_names() {
        let text = std::fs::read_to_string("/proc/cpuinfo").expect("what the kernel says of it");
        let value_of = |name: &str| {
            let (_, value) = text
                .lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(key, _)| key.trim() == name)
                .unwrap_or_else(|| panic!("{name} in /proc/cpuinfo"));
            value.trim()
        };
        let (vendor, family) = vendor_and_family();
        assert_eq!(std::str::from_utf8(&vendor), Ok(value_of("vendor_id")));
        assert_eq!(family.to_string(), value_of("cpu family"));
    }
}
