//! The TLS of two ends over a wire in memory that takes and gives few bytes at a time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::tests::authority::Authority;

/// One direction of a wire.
#[derive(Debug, Default)]
struct Direction {
    bytes: RefCell<VecDeque<u8>>,
    is_closed: Cell<bool>,
}

/// One end of a wire.
struct WireEnd<'a> {
    to: &'a Direction,
    from: &'a Direction,
    /// The most bytes under way to the other end.
    capacity: usize,
    /// The most bytes of one read.
    read_max: usize,
}

impl TlsSocket for WireEnd<'_> {
    fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut from = self.from.bytes.borrow_mut();
        let count = from.len().min(bytes.len()).min(self.read_max);
        match count {
            0 if self.from.is_closed.get() => Ok(0),
            0 => Err(io::ErrorKind::WouldBlock.into()),
            count => {
                bytes.iter_mut().zip(from.drain(..count)).for_each(|(byte, read)| *byte = read);
                Ok(count)
            }
        }
    }

    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut to = self.to.bytes.borrow_mut();
        let room = self.capacity - to.len();
        let before = to.len();
        to.extend(slices.iter().flat_map(|slice| slice.iter()).take(room));
        match to.len() - before {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }
    }
}

/// The sessions of a client and of a server that have shaken hands.
fn sessions(client: &WireEnd<'_>, server: &WireEnd<'_>) -> (TlsSession, TlsSession) {
    let (client_tls, server_tls) = Authority::new().sessions();
    loop {
        let steps = (client_tls.handshake(client).unwrap(), server_tls.handshake(server).unwrap());
        if steps == (HandshakeStep::Done, HandshakeStep::Done) {
            return (client_tls, server_tls);
        }
    }
}

/// Reads what is there into slices of these lengths, and appends it.
fn read(tls: &TlsSession, socket: &WireEnd<'_>, lengths: &[usize], into: &mut Vec<u8>) -> bool {
    let mut buffers: Vec<Vec<u8>> = lengths.iter().map(|&length| vec![0; length]).collect();
    let mut slices: Vec<IoSliceMut<'_>> =
        buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
    match tls.read(&mut slices, socket) {
        Ok(count) => {
            into.extend(buffers.concat().iter().take(count));
            count > 0
        }
        Err(error) => {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            false
        }
    }
}

/// Sends bytes in slices of these lengths to an end that reads in slices of those. Returns what has
/// arrived once all is reported as written and the wire is empty.
fn carry(
    bytes: &[u8],
    slices: &[usize],
    reads: &[usize],
    capacity: usize,
    read_max: usize,
) -> Vec<u8> {
    let (there, back) = (Direction::default(), Direction::default());
    let client = WireEnd { to: &there, from: &back, capacity, read_max };
    let server = WireEnd { to: &back, from: &there, capacity, read_max };
    let (client_tls, server_tls) = sessions(&client, &server);
    let mut arrived = Vec::new();
    let mut written = 0;
    while written < bytes.len() {
        let mut rest = &bytes[written..];
        let mut chosen = Vec::new();
        for &length in slices {
            let (slice, behind) = rest.split_at(length.min(rest.len()));
            chosen.push(IoSlice::new(slice));
            rest = behind;
        }
        match client_tls.write(&chosen, &client) {
            Ok(count) => written += count,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                let has_read = read(&server_tls, &server, reads, &mut arrived);
                assert!(has_read || !there.bytes.borrow().is_empty() || written > 0);
            }
        }
    }
    // The writer never comes back: what it has written arrives without it.
    while read(&server_tls, &server, reads, &mut arrived) || !there.bytes.borrow().is_empty() {}
    assert!(!server_tls.has_received());
    arrived
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 % 251) as u8).collect()
}

#[test]
fn bytes_arrive_over_a_wire_that_takes_few_at_a_time() {
    for (capacity, read_max) in [(1 << 20, usize::MAX), (70_000, 1000), (5000, 100), (4096, 1)] {
        for len in [0, 1, 2, 80, 16_384, 16_385, 100_000] {
            if capacity == 4096 && len == 100_000 {
                continue;
            }
            let bytes = pattern(len);
            let arrived = carry(&bytes, &[80, 1, 70_000], &[80, 50_000], capacity, read_max);
            assert!(arrived == bytes, "{len} bytes, {capacity} under way, {read_max} a read");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bytes_arrive_in_any_slices(
        len in 0_usize..60_000,
        slices in prop::collection::vec(0_usize..20_000, 0..6),
        reads in prop::collection::vec(0_usize..20_000, 0..6),
        capacity in 4096_usize..40_000,
        read_max in 50_usize..40_000,
    ) {
        let bytes = pattern(len);
        let slices = [&slices[..], &[1]].concat();
        let reads = [&reads[..], &[1]].concat();
        prop_assert!(carry(&bytes, &slices, &reads, capacity, read_max) == bytes);
    }
}

#[test]
fn a_byte_is_written_once_its_record_is_in_the_socket() {
    let (there, back) = (Direction::default(), Direction::default());
    let client = WireEnd { to: &there, from: &back, capacity: 8192, read_max: usize::MAX };
    let server = WireEnd { to: &back, from: &there, capacity: 8192, read_max: usize::MAX };
    let (client_tls, server_tls) = sessions(&client, &server);
    let bytes = pattern(8192);
    // The record is longer than its bytes, so the socket does not take the whole of it.
    assert_eq!(client_tls.write(&[IoSlice::new(&bytes)], &client).unwrap(), 8191);
    let again = client_tls.write(&[IoSlice::new(&bytes[8191..])], &client);
    assert_eq!(again.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let mut arrived = Vec::new();
    assert!(!read(&server_tls, &server, &[9000], &mut arrived), "the record is cut");
    assert_eq!(client_tls.write(&[IoSlice::new(&bytes[8191..])], &client).unwrap(), 1);
    assert!(read(&server_tls, &server, &[9000], &mut arrived));
    assert!(arrived == bytes);
}

#[test]
fn plaintext_that_no_read_has_taken_is_told() {
    let (there, back) = (Direction::default(), Direction::default());
    let end = |to, from| WireEnd { to, from, capacity: 1 << 20, read_max: usize::MAX };
    let (client, server) = (end(&there, &back), end(&back, &there));
    let (client_tls, server_tls) = sessions(&client, &server);
    client_tls.write(&[IoSlice::new(b"0123456789")], &client).unwrap();
    let mut arrived = Vec::new();
    assert!(!server_tls.has_received(), "nothing is decrypted yet");
    read(&server_tls, &server, &[4], &mut arrived);
    assert!(server_tls.has_received() && arrived == b"0123");
    read(&server_tls, &server, &[100], &mut arrived);
    assert!(!server_tls.has_received() && arrived == b"0123456789");
}

#[test]
fn the_end_of_the_wire_is_the_end_of_the_stream() {
    let (there, back) = (Direction::default(), Direction::default());
    let end = |to, from| WireEnd { to, from, capacity: 1 << 20, read_max: usize::MAX };
    let (client, server) = (end(&there, &back), end(&back, &there));
    let (client_tls, server_tls) = sessions(&client, &server);
    client_tls.write(&[IoSlice::new(b"last")], &client).unwrap();
    there.is_closed.set(true);
    let mut bytes = [0; 8];
    let read = |bytes: &mut [u8]| server_tls.read(&mut [IoSliceMut::new(bytes)], &server);
    assert_eq!(read(&mut bytes).unwrap(), 4);
    assert_eq!(read(&mut bytes).unwrap(), 0);
}

#[test]
fn changed_bytes_end_the_session() {
    let (there, back) = (Direction::default(), Direction::default());
    let end = |to, from| WireEnd { to, from, capacity: 1 << 20, read_max: usize::MAX };
    let (client, server) = (end(&there, &back), end(&back, &there));
    let (client_tls, server_tls) = sessions(&client, &server);
    client_tls.write(&[IoSlice::new(b"a gradient")], &client).unwrap();
    there.bytes.borrow_mut()[9] ^= 1;
    let mut bytes = [0; 32];
    for _ in 0..2 {
        let read = server_tls.read(&mut [IoSliceMut::new(&mut bytes)], &server);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
    assert_eq!(bytes, [0; 32]);
}

#[test]
fn both_ends_know_the_same_binding_and_no_other_connection_does() {
    let (there, back) = (Direction::default(), Direction::default());
    let end = |to, from| WireEnd { to, from, capacity: 1 << 20, read_max: usize::MAX };
    let (client, server) = (end(&there, &back), end(&back, &there));
    let (client_tls, server_tls) = sessions(&client, &server);
    let binding = client_tls.binding().unwrap();
    assert_eq!(server_tls.binding(), Some(binding));
    let (other, _) = sessions(&client, &server);
    assert_ne!(other.binding(), Some(binding));
}
