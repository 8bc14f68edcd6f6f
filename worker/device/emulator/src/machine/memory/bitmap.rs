//! [`Bitmap`]: one bit for each byte of a memory.

/// One bit for each byte of a memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
}

impl Bitmap {
    /// A bitmap for this many bytes, with no bit set.
    pub(crate) fn new(bytes: usize) -> Bitmap {
        Bitmap { words: vec![0; bytes.div_ceil(64)] }
    }

    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Sets the bits of a range.
    #[inline]
    pub(crate) fn set(&mut self, at: usize, length: usize) {
        self.each_word(at, length, |word, mask| *word |= mask);
    }

    /// Clears the bits of a range.
    pub(crate) fn unset(&mut self, at: usize, length: usize) {
        self.each_word(at, length, |word, mask| *word &= !mask);
    }

    /// Whether all bits of a range are set.
    #[inline]
    pub(crate) fn has_all(&self, at: usize, length: usize) -> bool {
        let bit = at % 64;
        if bit + length > 64 || length == 0 {
            return self.first_unset(at, length).is_none();
        }
        // Every aligned access of a thread is inside one word.
        let mask = (u64::MAX >> (64 - length)) << bit;
        self.words[at / 64] & mask == mask
    }

    /// Returns the first place in a range whose bit is not set.
    pub(crate) fn first_unset(&self, at: usize, length: usize) -> Option<usize> {
        let end = at + length;
        let mut place = at;
        while place < end {
            let word = place / 64;
            let bit = place % 64;
            let count = (64 - bit).min(end - place);
            let mask = (u64::MAX >> (64 - count)) << bit;
            let unset = !self.words[word] & mask;
            if unset != 0 {
                return Some(word * 64 + unset.trailing_zeros() as usize);
            }
            place += count;
        }
        None
    }

    pub(crate) fn get(&self, at: usize) -> bool {
        self.words[at / 64] >> (at % 64) & 1 == 1
    }

    fn each_word(&mut self, at: usize, length: usize, mut change: impl FnMut(&mut u64, u64)) {
        let end = at + length;
        let mut place = at;
        while place < end {
            let word = place / 64;
            let bit = place % 64;
            let count = (64 - bit).min(end - place);
            change(&mut self.words[word], (u64::MAX >> (64 - count)) << bit);
            place += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cross_words() {
        let mut bits = Bitmap::new(200);
        bits.set(60, 80);
        assert_eq!(bits.first_unset(60, 80), None);
        assert_eq!(bits.first_unset(59, 2), Some(59));
        assert_eq!(bits.first_unset(100, 60), Some(140));
        bits.unset(64, 64);
        assert_eq!(bits.first_unset(60, 80), Some(64));
        assert!(bits.get(128) && !bits.get(127));
    }
}
