//! [`PieceHasher`]: the SHA-256 of a file, computed by another thread while the file is written or
//! read.

use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use sha2::{Digest, Sha256};

use crate::files::PIECE_BYTES;

/// The pieces that wait for the thread. With the piece that is filled and the one that is hashed, a
/// file takes the memory of four.
const WAITING_PIECES: usize = 2;

/// Hashes the pieces of one file in order. The first whole piece starts a thread, which ends with
/// the hasher.
#[derive(Debug)]
pub(crate) struct PieceHasher {
    /// The hash of all pieces, as long as there is no thread.
    own: Sha256,
    thread: Option<HashThread>,
}

/// The thread that hashes the pieces.
#[derive(Debug)]
struct HashThread {
    pieces: SyncSender<Vec<u8>>,
    /// Hashed pieces, whose memory is used again.
    hashed: Receiver<Vec<u8>>,
    thread: JoinHandle<Sha256>,
}

impl PieceHasher {
    pub(crate) fn new() -> PieceHasher {
        PieceHasher { own: Sha256::new(), thread: None }
    }

    /// Adds a piece. Leaves an earlier piece or an empty one in its place, as memory to use again.
    pub(crate) fn add(&mut self, piece: &mut Vec<u8>) {
        if self.thread.is_none() && piece.len() >= PIECE_BYTES {
            self.thread = HashThread::start(&self.own);
        }
        match &self.thread {
            Some(thread) => thread.add(piece),
            // A short file, or a system without a thread to spare.
            None => self.own.update(&*piece),
        }
    }

    /// Returns the hash of all pieces.
    pub(crate) fn finish(self) -> [u8; 32] {
        let hash = match self.thread {
            Some(HashThread { pieces, thread, .. }) => {
                drop(pieces);
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
            None => self.own,
        };
        hash.finalize().into()
    }
}

impl HashThread {
    /// Starts a thread that continues a hash; `None` if the system refuses.
    fn start(begun: &Sha256) -> Option<HashThread> {
        let mut hash = begun.clone();
        let (pieces, waiting) = sync_channel::<Vec<u8>>(WAITING_PIECES);
        let (done, hashed) = channel();
        let thread = Builder::new().name("hash".to_owned()).spawn(move || {
            for piece in waiting {
                hash.update(&piece);
                // Nobody wants the memory of the last pieces.
                let _ = done.send(piece);
            }
            hash
        });
        Some(HashThread { pieces, hashed, thread: thread.ok()? })
    }

    fn add(&self, piece: &mut Vec<u8>) {
        let earlier = self.hashed.try_recv().unwrap_or_else(|_| Vec::with_capacity(PIECE_BYTES));
        // The thread takes pieces until the sender is dropped.
        let _ = self.pieces.send(std::mem::replace(piece, earlier));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_pieces_is_that_of_their_bytes() {
        for lengths in [&[][..], &[3], &[PIECE_BYTES], &[7, PIECE_BYTES, 9], &[PIECE_BYTES; 9]] {
            let mut hasher = PieceHasher::new();
            let mut all = Vec::new();
            for (index, &length) in lengths.iter().enumerate() {
                let mut piece: Vec<u8> = (0..length).map(|at| (at * 31 + index) as u8).collect();
                all.extend_from_slice(&piece);
                hasher.add(&mut piece);
            }
            assert_eq!(hasher.finish(), *Sha256::digest(&all), "{lengths:?}");
        }
    }

    #[test]
    fn a_hasher_that_is_dropped_ends_its_thread() {
        let mut hasher = PieceHasher::new();
        hasher.add(&mut vec![1; PIECE_BYTES]);
        let HashThread { pieces, thread, .. } = hasher.thread.unwrap();
        drop(pieces);
        thread.join().unwrap();
    }
}
