//! Draws the throughputs by size, with the ceilings as dashed lines.

use std::collections::BTreeMap;
use std::path::Path;

use plotters::prelude::*;

use super::report::{ReportLine, Unit};
use super::{BenchError, bytes_of};

/// Width and height of the picture.
const PIXELS: (u32, u32) = (960, 540);

/// Points of one verb over one transport: the binary logarithm of the bytes, our throughput, the
/// ceiling.
type Points = Vec<(f64, f64, f64)>;

/// Draws the throughput rows that differ in size only, as curves in an SVG file.
pub(crate) fn draw(path: &Path, lines: &[ReportLine]) -> Result<(), BenchError> {
    let curves = curves(lines);
    let points = || curves.values().flatten();
    let sizes = points().map(|&(size, ..)| size);
    let (least, most) = sizes.fold((f64::MAX, 0.0_f64), |(a, b), size| (a.min(size), b.max(size)));
    if least >= most {
        return Err(
            "--plot: cannot draw a curve without pulls and pushes of at least two --sizes".into()
        );
    }
    let top = points().fold(0.0_f64, |top, &(_, ours, ceiling)| top.max(ours).max(ceiling));
    let picture = SVGBackend::new(path, PIXELS).into_drawing_area();
    picture.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&picture)
        .caption("Throughput by size; dashed: the ceiling", ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(least..most, 0.0..top * 1.05)?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .y_desc("GB/s")
        .x_labels((most - least).ceil().min(12.0) as usize + 1)
        .x_label_formatter(&|size| with_unit(size.exp2()))
        .draw()?;
    for (place, (name, points)) in curves.iter().enumerate() {
        let colour = Palette99::pick(place).to_rgba();
        let ours = points.iter().map(|&(size, ours, _)| (size, ours));
        let ceiling = points.iter().map(|&(size, _, ceiling)| (size, ceiling));
        chart
            .draw_series(LineSeries::new(ours, colour.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
        chart.draw_series(DashedLineSeries::new(ceiling, 6, 5, colour.stroke_width(1)))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    picture.present()?;
    Ok(())
}

/// Groups the rows into curves, sorted by size: `pull_tcp_4MiB` is a point of `pull_tcp`.
fn curves(lines: &[ReportLine]) -> BTreeMap<String, Points> {
    let mut curves: BTreeMap<String, Points> = BTreeMap::new();
    for line in lines.iter().filter(|line| line.unit == Unit::Throughput) {
        let Some(ceiling) = line.ceiling else { continue };
        let words: Vec<&str> = line.name.split('_').collect();
        let [verb @ ("pull" | "push"), transport, size, setting @ ..] = &words[..] else {
            continue;
        };
        let Ok(bytes) = bytes_of(size) else { continue };
        let name = [&[*verb, *transport], setting].concat().join("_");
        curves.entry(name).or_default().push(((bytes as f64).log2(), line.ours, ceiling));
    }
    curves.values_mut().for_each(|points| points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    curves
}

/// Formats a number of bytes with a unit.
fn with_unit(bytes: f64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.into_iter().find(|&(_, bits)| bytes >= f64::from(1_u32 << bits));
    let (unit, bits) = unit.unwrap_or(("B", 0));
    format!("{:.0} {unit}", bytes / f64::from(1_u32 << bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, ours: f64) -> ReportLine {
        let name = name.to_owned();
        let unit = Unit::Throughput;
        let ceiling_name = "rr";
        ReportLine {
            name,
            unit,
            ours,
            ceiling: Some(2.0 * ours),
            p99: None,
            ceiling_name,
            rounds: 5,
        }
    }

    #[test]
    fn the_plot_has_a_curve_for_each_verb_and_transport() {
        let lines = [
            line("push_uds_4MiB", 3.0),
            line("push_uds_64B", 0.5),
            line("pull_tcp_4MiB", 4.0),
            line("apply_sgd", 9.0),
            line("pull_tcp_1MiB", 2.0),
            line("pull_tcp_1MiB_replicas2", 5.0),
        ];
        let curves = curves(&lines);
        assert_eq!(
            curves.keys().collect::<Vec<_>>(),
            ["pull_tcp", "pull_tcp_replicas2", "push_uds"]
        );
        assert_eq!(curves["pull_tcp"], [(20.0, 2.0, 4.0), (22.0, 4.0, 8.0)]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        draw(&path, &lines).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        assert!(picture.starts_with("<svg"), "{picture}");
        for word in ["pull_tcp", "push_uds", "GB/s", "1 MiB"] {
            assert!(picture.contains(word), "{word} is not in {picture}");
        }
        assert!(draw(&path, &lines[..1]).is_err());
    }
}
