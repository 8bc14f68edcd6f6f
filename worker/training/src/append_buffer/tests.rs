use std::sync::{Arc, Mutex};

use super::*;

/// An output with room for some bytes, which may grow later.
#[derive(Clone, Debug, Default)]
pub(crate) struct FullDisk {
    state: Arc<Mutex<(usize, Vec<u8>)>>,
}

impl FullDisk {
    pub(crate) fn with_room(room: usize) -> FullDisk {
        FullDisk { state: Arc::new(Mutex::new((room, Vec::new()))) }
    }

    pub(crate) fn add_room(&self, room: usize) {
        self.state.lock().unwrap().0 += room;
    }

    pub(crate) fn contents(&self) -> Vec<u8> {
        self.state.lock().unwrap().1.clone()
    }
}

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.state.lock().unwrap();
        let count = bytes.len().min(state.0);
        if count == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.0 -= count;
        state.1.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn entries_count_as_buffered_until_their_last_byte_is_written() {
    let disk = FullDisk::with_room(4);
    let mut buffer = AppendBuffer::new(disk.clone());
    buffer.append(&[b"ab", b"c"]).unwrap();
    buffer.append(&[b"de"]).unwrap();
    buffer.append(&[]).unwrap();
    assert_eq!(buffer.buffered(), 3);
    assert_eq!(buffer.flush().unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!((buffer.buffered(), disk.contents()), (2, b"abcd".to_vec()));
    disk.add_room(1);
    buffer.flush().unwrap();
    assert_eq!((buffer.buffered(), disk.contents()), (0, b"abcde".to_vec()));
}

#[test]
fn a_long_entry_does_not_keep_its_memory() {
    let mut buffer = AppendBuffer::new(io::sink());
    buffer.append(&[&[1; 1 << 20]]).unwrap();
    buffer.flush().unwrap();
    assert!(buffer.memory_bytes() <= AppendBuffer::<io::Sink>::BYTES);
}

/// Claims more bytes than it was given.
struct Boaster;

impl Write for Boaster {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len() + 1)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_output_that_claims_too_much_is_survived() {
    let mut buffer = AppendBuffer::new(Boaster);
    buffer.append(&[b"abc"]).unwrap();
    buffer.flush().unwrap();
    assert_eq!(buffer.buffered(), 0);
}

#[test]
fn an_output_that_takes_nothing_is_an_error() {
    let mut buffer = AppendBuffer::new(&mut [][..]);
    buffer.append(&[b"abc"]).unwrap();
    assert_eq!(buffer.flush().unwrap_err().kind(), io::ErrorKind::WriteZero);
    assert_eq!(buffer.buffered(), 1);
}
