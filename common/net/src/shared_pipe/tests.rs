#![cfg(target_os = "linux")]

use std::io::{ErrorKind, IoSlice, IoSliceMut};

use proptest::prelude::*;

use super::*;

const CAPACITY: u64 = 4096;

fn pipe() -> (PipeWriter, PipeReader) {
    let (reader, descriptor) = PipeReader::create(CAPACITY).unwrap();
    (PipeWriter::open(descriptor, CAPACITY).unwrap(), reader)
}

fn kind<T: std::fmt::Debug>(result: io::Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

proptest! {
    /// Writes and reads of any lengths, in any order: the bytes come out as they went in.
    #[test]
    fn bytes_arrive_in_order_and_once(
        turns in prop::collection::vec((any::<bool>(), 0_usize..3000, 0_usize..3000), 1..200),
    ) {
        let (mut writer, mut reader) = pipe();
        let mut next_in = 0_u32;
        let mut next_out = 0_u32;
        let byte = |index: u32| (index.wrapping_mul(0x9e37_79b1) >> 24) as u8;
        for (writes, first, second) in turns {
            if writes {
                let bytes: Vec<u8> = (0..(first + second) as u32).map(|at| byte(next_in + at)).collect();
                let (head, body) = bytes.split_at(first);
                let room = (CAPACITY as u32 - (next_in - next_out)) as usize;
                match writer.write(&[IoSlice::new(head), IoSlice::new(body)]) {
                    Ok(count) => {
                        prop_assert_eq!(count, bytes.len().min(room));
                        next_in += count as u32;
                    }
                    Err(error) => {
                        prop_assert_eq!(error.kind(), ErrorKind::WouldBlock);
                        prop_assert_eq!(bytes.len().min(room), 0);
                    }
                }
            } else {
                let (mut head, mut body) = (vec![0; first], vec![0; second]);
                let mut slices = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut body)];
                let count = reader.read(&mut slices).unwrap_or(0);
                prop_assert_eq!(count, (first + second).min((next_in - next_out) as usize));
                for found in head.iter().chain(&body).take(count) {
                    prop_assert_eq!(*found, byte(next_out));
                    next_out += 1;
                }
            }
        }
    }
}

#[test]
fn one_side_sleeps_only_if_the_other_has_done_nothing() {
    let (mut writer, mut reader) = pipe();
    assert!(!reader.begin_sleep().unwrap(), "nothing is there");
    writer.write(&[IoSlice::new(&[1])]).unwrap();
    assert!(writer.wakes_reader());
    assert!(!writer.wakes_reader(), "once");
    assert!(reader.begin_sleep().unwrap(), "a byte is there");
    reader.end_sleep();
    writer.write(&[IoSlice::new(&[2; 4095])]).unwrap();
    assert!(!writer.wakes_reader(), "it does not sleep");
    assert!(!writer.begin_sleep().unwrap(), "the pipe is full");
    reader.read(&mut [IoSliceMut::new(&mut [0; 10])]).unwrap();
    assert!(writer.begin_sleep().unwrap(), "there is room");
    assert!(reader.wakes_writer());
}

#[test]
fn counts_that_cannot_be_are_refused() {
    let (mut writer, mut reader) = pipe();
    writer.memory.word(WRITTEN).store(CAPACITY + 1, Ordering::Release);
    assert_eq!(kind(reader.read(&mut [IoSliceMut::new(&mut [0; 8])])), ErrorKind::InvalidData);
    assert_eq!(kind(reader.begin_sleep()), ErrorKind::InvalidData);
    reader.memory.word(READ).store(1, Ordering::Release);
    assert_eq!(kind(writer.write(&[IoSlice::new(&[1])])), ErrorKind::InvalidData);
    assert_eq!(kind(writer.begin_sleep()), ErrorKind::InvalidData);
}

#[test]
fn only_a_sealed_file_of_the_right_length_is_a_pipe() {
    let open = |bytes, capacity| PipeWriter::open(sealed_file(bytes).unwrap().into(), capacity);
    open(4096 + CAPACITY, CAPACITY).unwrap();
    for (bytes, capacity) in
        [(4095 + CAPACITY, CAPACITY), (4096 + 5000, 5000), (4096, 0), (4096 + 2048, 2048)]
    {
        assert_eq!(kind(open(bytes, capacity)), ErrorKind::InvalidData, "{bytes} {capacity}");
    }
    assert_eq!(kind(open(4096 + CAPACITY, 128 << 20)), ErrorKind::InvalidData);
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let open_ended = File::from(rustix::fs::memfd_create("test", flags).unwrap());
    open_ended.set_len(4096 + CAPACITY).unwrap();
    assert_eq!(kind(PipeWriter::open(open_ended.into(), CAPACITY)), ErrorKind::InvalidData);
}

#[test]
fn two_threads_pass_many_bytes() {
    let (mut writer, mut reader) = pipe();
    let bytes = 3_000_000_u32;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let all: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            let mut at = 0;
            while at < all.len() {
                match writer.write(&[IoSlice::new(&all[at..])]) {
                    Ok(count) => at += count,
                    Err(_) => std::thread::yield_now(),
                }
            }
        });
        let mut next = 0_u32;
        let mut found = [0; 1000];
        while next < bytes {
            let Ok(count) = reader.read(&mut [IoSliceMut::new(&mut found)]) else {
                std::thread::yield_now();
                continue;
            };
            for byte in &found[..count] {
                assert_eq!(*byte, (next % 251) as u8);
                next += 1;
            }
        }
    });
}
