//! A pool of bulk buffers.

/// The shortest pooled buffer. Below this, an allocation costs less than the search for a buffer.
const POOLED_BYTES_MIN: usize = 4 << 10;

/// The most buffers in the pool: a worker has as many parts in flight.
const POOLED_BUFFERS_MAX: usize = 8;

/// How many times longer than requested a pooled buffer may be. Queues count bytes by length, not
/// by capacity.
const EXCESS_MAX: usize = 4;

/// Buffers for encoded bodies, row numbers, and rows to be sent. None is longer than a part.
#[derive(Debug, Default)]
pub(in crate::shard) struct BufferPool(Vec<Vec<u8>>);

impl BufferPool {
    /// Takes an empty buffer with capacity for this many bytes, or one that grows to that.
    pub(in crate::shard) fn take(&mut self, bytes: usize) -> Vec<u8> {
        if bytes < POOLED_BYTES_MIN {
            return Vec::new();
        }
        let most = bytes.saturating_mul(EXCESS_MAX);
        let fits = self.0.iter().enumerate().filter(|(_, buffer)| buffer.capacity() <= most);
        let longest = fits.max_by_key(|(_, buffer)| buffer.capacity()).map(|(at, _)| at);
        longest.map(|at| self.0.swap_remove(at)).unwrap_or_default()
    }

    /// Returns a buffer to the pool.
    pub(in crate::shard) fn put(&mut self, mut buffer: Vec<u8>) {
        if buffer.capacity() >= POOLED_BYTES_MIN && self.0.len() < POOLED_BUFFERS_MAX {
            buffer.clear();
            self.0.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_at_most_four_times_longer_than_needed() {
        let mut pool = BufferPool::default();
        for bytes in [1 << 20, 64 << 10, 100] {
            pool.put(Vec::with_capacity(bytes));
        }
        let mut taken = |bytes| pool.take(bytes).capacity();
        assert_eq!(taken(1), 0, "small buffers are not pooled");
        assert_eq!(taken(8 << 10), 0, "the others are too long");
        assert_eq!(taken(20 << 10), 64 << 10);
        assert_eq!(taken(1 << 20), 1 << 20);
        assert_eq!(taken(1 << 20), 0);
    }

    #[test]
    fn the_pool_keeps_a_bounded_number_of_buffers() {
        let mut pool = BufferPool::default();
        (0..POOLED_BUFFERS_MAX + 3).for_each(|_| pool.put(vec![7; 1 << 20]));
        for _ in 0..POOLED_BUFFERS_MAX {
            let buffer = pool.take(1 << 20);
            assert!(buffer.is_empty() && buffer.capacity() >= 1 << 20);
        }
        assert_eq!(pool.take(1 << 20).capacity(), 0);
    }
}
