//! Microbenchmarks of the inner loops (`cargo bench -p benches`), each group beside a copy of the
//! same bytes or the rule in place.
//!
//! `pushpull bench` and the bench `suites` measure a whole server.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::hint::black_box;
use std::io::IoSliceMut;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pushpull::optim::Optimizer;
use pushpull::worker::Codec;
use pushpull::{Adam, Sgd};
use pushpull_common::ids::{PartitionId, RequestId};
use pushpull_common::protocol::message::{Pull, Selection};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, Poll, encode};
use pushpull_ps::measure::{InPlace, StoreUnderTest};

/// Number of elements that are encoded at once.
const ELEMENTS: usize = 1 << 16;

fn codecs(criterion: &mut Criterion) {
    let values: Vec<f32> = (0..ELEMENTS).map(|i| ((i * 7919) % 1000) as f32 - 500.0).collect();
    let bytes = 4 * ELEMENTS;
    let codecs = [
        ("f16", Codec::F16),
        ("bf16", Codec::Bf16),
        ("int8", Codec::Int8),
        ("one_bit", Codec::OneBit),
        ("top_1_percent", Codec::TopK { fraction: 0.01 }),
        ("threshold", Codec::Threshold { magnitude: 495.0 }),
    ];
    for verb in ["encode", "decode"] {
        let mut group = criterion.benchmark_group(verb);
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut target = vec![0.0_f32; ELEMENTS];
        group.bench_function("copy", |bencher| {
            bencher.iter(|| black_box(&mut target).copy_from_slice(black_box(&values)));
        });
        for (name, codec) in &codecs {
            let mut encoded = Vec::new();
            codec.encode(&values, &mut encoded).unwrap();
            group.bench_function(*name, |bencher| match verb {
                "encode" => bencher.iter(|| {
                    encoded.clear();
                    codec.encode(black_box(&values), &mut encoded).unwrap();
                }),
                _ => bencher.iter(|| {
                    let encoded = black_box(&encoded[..]);
                    codec.encoding().decode(encoded, &mut target).unwrap();
                }),
            });
        }
        group.finish();
    }
}

/// Encodes and decodes a request without a body, whose meta names 16 partitions.
fn frames(criterion: &mut Criterion) {
    let partitions = List::new((0..16).map(PartitionId).collect()).unwrap();
    let message = Message::from(Pull { selection: Selection::Partitions { partitions } });
    let envelope = Envelope { request: RequestId(7), ..Envelope::default() };
    let mut frame = Vec::new();
    encode(&mut frame, &envelope, &message, BodyStamp::plain(0));
    let mut group = criterion.benchmark_group("frame");
    group.throughput(Throughput::Bytes(frame.len() as u64));
    let mut copied = vec![0_u8; frame.len()];
    group.bench_function("copy", |bencher| {
        bencher.iter(|| black_box(&mut copied).copy_from_slice(black_box(&frame)));
    });
    let mut written = Vec::with_capacity(frame.len());
    group.bench_function("encode", |bencher| {
        bencher.iter(|| {
            written.clear();
            encode(&mut written, &envelope, black_box(&message), BodyStamp::plain(0));
        });
    });
    let mut reader = FrameReader::new();
    reader.open();
    group.bench_function("decode", |bencher| {
        bencher.iter(|| {
            let mut rest = black_box(&frame[..]);
            let mut source =
                |slices: &mut [IoSliceMut<'_>]| std::io::Read::read_vectored(&mut rest, slices);
            let poll = reader.poll(&mut source).unwrap();
            assert!(matches!(poll, Poll::Frame(..)), "the frame is complete");
        });
    });
    group.finish();
}

/// Pushes 256 KiB, which stay in cache, through the store and with the rule in place.
fn applies(criterion: &mut Criterion) {
    let rules: [Arc<dyn Optimizer>; 2] = [Arc::new(Sgd::new(0.5)), Arc::new(Adam::default())];
    for rule in rules {
        let gradient = vec![1.0_f32; ELEMENTS];
        let mut group = criterion.benchmark_group(format!("apply_{}", rule.kind()));
        group.throughput(Throughput::Bytes(4 * ELEMENTS as u64));
        let mut in_place = InPlace::new(ELEMENTS, rule.clone()).unwrap();
        group.bench_function("in_place", |bencher| {
            bencher.iter(|| in_place.push(black_box(&gradient)));
        });
        let mut store = StoreUnderTest::new(ELEMENTS as u64, rule).unwrap();
        group.bench_function("committed", |bencher| {
            bencher.iter(|| store.push(black_box(&gradient)));
        });
        group.finish();
    }
}

criterion_group!(benches, codecs, frames, applies);
criterion_main!(benches);
