//! [`PinnedWords`]: pages that a device copies from and to by itself.

#[cfg(not(feature = "devices"))]
pub(crate) use without_devices::PinnedWords;

/// Pages that a device copies from and to by itself, as words.
#[cfg(feature = "devices")]
pub(crate) type PinnedWords = pushpull_device::Pinned<u64>;

#[cfg(not(feature = "devices"))]
mod without_devices {
    use std::ops::{Deref, DerefMut};

    /// There are none: nothing pins pages.
    #[derive(Debug)]
    pub(crate) enum PinnedWords {}

    impl PinnedWords {
        pub(crate) fn another(&self, _length: usize) -> Result<PinnedWords, ()> {
            match *self {}
        }
    }

    impl Deref for PinnedWords {
        type Target = [u64];

        fn deref(&self) -> &[u64] {
            match *self {}
        }
    }

    impl DerefMut for PinnedWords {
        fn deref_mut(&mut self) -> &mut [u64] {
            match *self {}
        }
    }
}
